// Watches a word of memory that a GPU writes and turns each change into an eventfd event.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include <time.h>
#include <unistd.h>

#include "freetoken.h"

struct ft_watch {
    const std::atomic<uint64_t> *word;
    int eventfd;
    std::mutex lock;
    std::condition_variable armed;
    std::atomic<uint64_t> target{0};
    std::atomic<bool> ending{false};
    std::atomic<int64_t> seen_ns{0};
    std::thread thread;
};

namespace {

// A step that takes longer than this is no decode step: looking 20,000 times a second then costs nothing and misses nothing.
constexpr auto SPIN_TIME = std::chrono::milliseconds(50);
constexpr auto NAP = std::chrono::microseconds(50);

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

void announce(int eventfd) {
    const uint64_t one = 1;
    // Fails only if the counter is full (then the reader is awake anyway) or the descriptor is closed (nobody listens).
    if (write(eventfd, &one, sizeof one) < 0) return;
}

void serve(ft_watch *watch) {
    uint64_t seen = 0;
    while (true) {
        {
            std::unique_lock<std::mutex> hold(watch->lock);
            watch->armed.wait(hold, [&] { return watch->ending || watch->target > seen; });
        }
        auto began = std::chrono::steady_clock::now();
        uint64_t now;
        while ((now = watch->word->load(std::memory_order_acquire)) <= seen) {
            if (watch->ending) return;
            for (int i = 0; i < 32; ++i) pause_cpu();
            if (std::chrono::steady_clock::now() - began > SPIN_TIME) std::this_thread::sleep_for(NAP);
        }
        if (watch->ending) return;
        seen = now;
        watch->seen_ns = monotonic_ns();
        announce(watch->eventfd);
    }
}

}  // namespace

extern "C" {

FT_API int ft_watch_open(const uint64_t *word, int32_t eventfd, ft_watch **out) {
    static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t), "the word is read in place");
    auto *watch = new (std::nothrow) ft_watch;
    if (!watch) return FT_NO_MEMORY;
    watch->word = reinterpret_cast<const std::atomic<uint64_t> *>(word);
    watch->eventfd = eventfd;
    try {
        watch->thread = std::thread(serve, watch);
    } catch (const std::system_error &) {
        delete watch;
        return FT_NO_THREAD;
    }
    *out = watch;
    return FT_OK;
}

FT_API void ft_watch_arm(ft_watch *watch, uint64_t number) {
    {
        std::lock_guard<std::mutex> hold(watch->lock);
        watch->target = number;
    }
    watch->armed.notify_one();
}

FT_API int64_t ft_watch_seen_ns(const ft_watch *watch) { return watch->seen_ns; }

FT_API void ft_watch_close(ft_watch *watch) {
    if (!watch) return;
    {
        std::lock_guard<std::mutex> hold(watch->lock);
        watch->ending = true;
    }
    watch->armed.notify_one();
    watch->thread.join();
    delete watch;
}

}  // extern "C"
