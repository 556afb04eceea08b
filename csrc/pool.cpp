#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace troth {

namespace {

constexpr int SPINS_BEFORE_YIELD = 2000;   // about 50 us: longer than any imbalance inside a decode step
constexpr int SPINS_BEFORE_SLEEP = 20000;  // about 0.5 ms: the host's work between two steps that are not started ahead

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr uint64_t ONE_DONE = 1ull << 16, ONE_MORE = 1;

inline int operation_of(uint64_t state) { return (int)(state >> 32); }
inline int done_of(uint64_t state) { return (int)(state >> 16 & 0xffff); }
inline int members_of(uint64_t state) { return (int)(state & 0xffff); }

}  // namespace

Pool::Pool(int threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    finish(started_.load());
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

long Pool::start(const Operation* operations, int count) {
    const long number = started_.load(std::memory_order_relaxed) + 1;
    if (!count) return number - 1;  // nobody would meet in it: a late worker would take another program for this one
    // This takes the place of program number - PROGRAMS. Once the one behind that has ended, every worker has taken part
    // in it, and so has left the old one.
    finish(number - PROGRAMS + 1);
    Program& made = program(number);
    made.operations.assign(operations, operations + count);
    if (made.room < count) {
        made.room = count * 2;
        made.next.reset(new std::atomic<int>[made.room]);
    }
    for (int i = 0; i < count; i++) made.next[i].store(0, std::memory_order_relaxed);
    made.state.store(workers_.size(), std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        started_.store(number, std::memory_order_release);
    }
    wake_.notify_all();
    return number;
}

void Pool::finish(long number) {
    for (; finished_ < number; finished_++) {
        Program& joined = program(finished_ + 1);
        const int count = (int)joined.operations.size();
        uint64_t state = joined.state.load(std::memory_order_acquire);
        while (operation_of(state) < count &&
               !joined.state.compare_exchange_weak(state, state + ONE_MORE, std::memory_order_acq_rel,
                                                   std::memory_order_acquire)) {
        }
        if (operation_of(state) < count) take_part(joined, operation_of(state), 0);
    }
}

bool Pool::is_finished(long number) const {
    if (number <= finished_) return true;
    const Program& asked = programs_[number % PROGRAMS];
    return operation_of(asked.state.load(std::memory_order_acquire)) >= (int)asked.operations.size();
}

void Pool::work(int thread) {
    for (long seen = 0;;) {
        for (int i = 0; i < SPINS_BEFORE_SLEEP && started_.load(std::memory_order_acquire) == seen; i++) pause();
        if (started_.load(std::memory_order_acquire) == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return closing_ || started_.load(std::memory_order_acquire) != seen; });
            if (started_.load(std::memory_order_acquire) == seen) return;
        }
        take_part(program(++seen), 0, thread);
    }
}

void Pool::take_part(Program& program, int first, int thread) {
    // A copy: after the last meeting the caller may already be setting up another program in this place.
    const int count = (int)program.operations.size();
    for (int i = first; i < count; i++) {
        const Operation operation = program.operations[i];
        operation.run(operation.arguments, Turn{thread, threads(), &program.next[i]});
        meet(program, i);
    }
}

// Everyone who takes part waits until everyone has done the operation. Who joins meanwhile is waited for, too.
void Pool::meet(Program& program, int operation) {
    uint64_t state = program.state.load(std::memory_order_relaxed), after;
    do {
        const bool is_last = done_of(state) + 1 == members_of(state);
        after = is_last ? (uint64_t)(operation + 1) << 32 | members_of(state) : state + ONE_DONE;
    } while (!program.state.compare_exchange_weak(state, after, std::memory_order_acq_rel, std::memory_order_relaxed));
    for (int i = 0; operation_of(after) == operation; i++) {
        if (i < SPINS_BEFORE_YIELD)
            pause();
        else
            std::this_thread::yield();
        after = program.state.load(std::memory_order_acquire);
    }
}

}  // namespace troth
