// A pool of threads that share numbered units of work. Knows nothing of what a unit is.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "freetoken.h"
#include "kernels.h"

// Owns its threads and the working memory of the one operation that may run at a time (`busy` is held for its length).
struct ft_pool {
    ft_pool(const ft_pool_options &options, int isa);
    ~ft_pool();
    ft_pool(const ft_pool &) = delete;
    ft_pool &operator=(const ft_pool &) = delete;

    // Call work(unit, thread) once for each unit < units, on all threads; return when all are done. `work` must not throw.
    template <class Work>
    void run(int64_t units, const Work &work) {
        const auto call = [](const void *context, int64_t unit, int thread) {
            (*static_cast<const Work *>(context))(unit, thread);
        };
        run_units(units, call, &work);
    }

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Grow-only; contents are lost at growth.
    float *floats(int64_t count);

    Kernels kernels{};
    int isa;
    std::mutex busy;

private:
    using Call = void (*)(const void *, int64_t, int);
    void run_units(int64_t units, Call call, const void *context);
    void take_units(int thread);
    void stand_by(int thread, int cpu);
    bool wait_round(uint64_t seen);
    void join();

    std::vector<std::thread> workers_;
    std::vector<float> floats_;
    int64_t spin_us_;
    Call call_ = nullptr;
    const void *context_ = nullptr;
    int64_t units_ = 0;
    // The four below are sequentially consistent: see stand_by. A cache line each, because all threads look at them.
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<uint64_t> round_{0};
    std::atomic<bool> is_open_{false};
    std::atomic<bool> closing_{false};
    std::mutex sleep_;
    std::condition_variable wake_;
    std::condition_variable done_;
};
