#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace troth {

namespace {

constexpr int SPINS_BEFORE_YIELD = 2000;   // about 50 us: longer than any imbalance inside a decode step
constexpr int SPINS_BEFORE_SLEEP = 20000;  // workers stay awake for about the host's work between two steps

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
        program_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::run(const Operation* operations, int count) {
    if (!count) return;  // without a meeting a late worker would take the next program for this one
    if ((int)next_.size() < count) next_ = std::vector<std::atomic<int>>(count * 2);
    for (int i = 0; i < count; i++) next_[i].store(0, std::memory_order_relaxed);
    operations_ = operations;
    count_ = count;
    if (!workers_.empty()) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            program_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
    }
    share(0);
}

void Pool::work(int thread) {
    long seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS_BEFORE_SLEEP && program_.load(std::memory_order_acquire) == seen; i++) pause();
        if (program_.load(std::memory_order_acquire) == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return program_.load(std::memory_order_acquire) != seen; });
        }
        if (closing_) return;
        seen++;
        share(thread);
    }
}

void Pool::share(int thread) {
    // Copies: after the last meeting the caller may already be setting up the next program.
    const Operation* operations = operations_;
    std::atomic<int>* next = next_.data();
    const int count = count_;
    for (int i = 0; i < count; i++) {
        operations[i].run(operations[i].arguments, Turn{thread, threads(), &next[i]});
        meet();
    }
}

// Everyone waits until everyone has arrived.
void Pool::meet() {
    if (workers_.empty()) return;
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == (int)workers_.size()) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int i = 0; round_.load(std::memory_order_acquire) == round; i++) {
        if (i < SPINS_BEFORE_YIELD)
            pause();
        else
            std::this_thread::yield();
    }
}

}  // namespace troth
