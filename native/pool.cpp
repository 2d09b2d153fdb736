// Threads that look for work for a short while, then sleep. The caller of an operation always works too.
#include "pool.h"

#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// True as soon as `is_over` is; false if `limit_us` pass first. The clock is read every 64 looks (about 1 us).
template <class Condition>
bool spin(int64_t limit_us, const Condition &is_over) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(limit_us);
    do {
        for (int i = 0; i < 64; ++i) {
            if (is_over()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return is_over();
}

// CPUs this process may use, in order; empty where the system does not tell.
std::vector<int> allowed_cpus() {
    std::vector<int> out;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
            if (CPU_ISSET(cpu, &set)) out.push_back(cpu);
#endif
    return out;
}

void bind_to(int cpu) {
#if defined(__linux__)
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a refusal costs speed only
#else
    (void)cpu;
#endif
}

}  // namespace

ft_pool::ft_pool(const ft_pool_options &options, int chosen) : isa(chosen), spin_us_(options.spin_us) {
    const std::vector<int> cpus = options.pin ? allowed_cpus() : std::vector<int>();
    workers_.reserve(static_cast<size_t>(options.threads - 1));
    try {
        for (int thread = 1; thread < options.threads; ++thread) {
            const int cpu = cpus.empty() ? -1 : cpus[static_cast<size_t>(thread) % cpus.size()];
            workers_.emplace_back([this, thread, cpu] { stand_by(thread, cpu); });
        }
    } catch (...) {
        join();  // the threads already started end before their memory goes
        throw;
    }
}

ft_pool::~ft_pool() { join(); }

void ft_pool::join() {
    {
        std::lock_guard<std::mutex> lock(sleep_);
        closing_ = true;
    }
    wake_.notify_all();
    for (auto &worker : workers_) worker.join();
}

float *ft_pool::floats(int64_t count) {
    if (static_cast<int64_t>(floats_.size()) < count) {
        floats_.clear();
        floats_.resize(static_cast<size_t>(count));
    }
    return floats_.data();
}

void ft_pool::take_units(int thread) {
    for (;;) {
        const int64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
        if (unit >= units_) return;
        call_(context_, unit, thread);
    }
}

void ft_pool::run_units(int64_t units, Call call, const void *context) {
    if (units <= 1 || workers_.empty()) {
        for (int64_t unit = 0; unit < units; ++unit) call(context, unit, 0);
        return;
    }
    call_ = call;
    context_ = context;
    units_ = units;
    next_.store(0, std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(sleep_);
        ++round_;
        is_open_ = true;
    }
    wake_.notify_all();
    take_units(0);
    is_open_ = false;  // every unit is taken: a thread that wakes only now is not waited for
    const auto is_over = [this] { return inside_ == 0; };
    if (spin(spin_us_, is_over)) return;
    std::unique_lock<std::mutex> lock(sleep_);
    done_.wait(lock, is_over);
}

bool ft_pool::wait_round(uint64_t seen) {
    const auto is_over = [this, seen] { return round_ != seen || closing_; };
    if (!spin(spin_us_, is_over)) {
        std::unique_lock<std::mutex> lock(sleep_);
        wake_.wait(lock, is_over);
    }
    return !closing_;
}

void ft_pool::stand_by(int thread, int cpu) {
    bind_to(cpu);
    for (uint64_t seen = 0; wait_round(seen);) {
        seen = round_;
        // Announce first, look second; the caller does the reverse, so one of the two sees the other.
        ++inside_;
        if (is_open_) take_units(thread);
        if (--inside_ == 0) {
            std::lock_guard<std::mutex> lock(sleep_);  // pairs with the caller's last look before it sleeps
            done_.notify_one();
        }
    }
}
