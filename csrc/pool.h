// A thread pool for programs of many short operations with a barrier after each.
//
// Programs are started and run in order, like work on a GPU's stream: the workers begin at once, and the calling thread
// takes part from the moment when it waits for one, in whichever operation that is then. Workers spin
// between operations, because a decode step has hundreds of them, and for about half a millisecond after the last
// program; then they sleep, so that they do not take cores from torch or from other processes.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace troth {

// What an operation is given: which thread it runs on, of at most how many, and a way to share out work. Some of the
// threads may come when all is taken, or not at all.
struct Turn {
    int thread;
    int threads;
    std::atomic<int>* next;

    // Hands out 0 .. count - 1, each to one thread; -1 when all are taken.
    int take(int count) {
        int i = next->fetch_add(1, std::memory_order_relaxed);
        return i < count ? i : -1;
    }
};

// One operation: called by every thread that takes part; its arguments stay valid until the program has ended.
struct Operation {
    void (*run)(const void* arguments, Turn turn);
    const void* arguments;
};

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();  // finishes what was started
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return (int)workers_.size() + 1; }

    // Have the operations run in order behind what was started before, and return at once; the number of this program.
    // They are copied, their arguments are not. Without workers they run when somebody waits. One caller at a time.
    long start(const Operation* operations, int count);

    // Take part until this program and all before it have ended. One caller at a time.
    void finish(long program);

    // The number of the program that was started last.
    long last() const { return started_.load(std::memory_order_relaxed); }

    // Whether finish would return at once.
    bool is_finished(long program) const;

private:
    static constexpr int PROGRAMS = 4;  // places; where only one is left, to start a program waits for the oldest

    // Who is where: the operation under way << 32 | threads that have done it << 16 | threads that take part. In one
    // number, so that a thread can join between two operations, or in one, and everyone agrees about it.
    struct Program {
        std::vector<Operation> operations;
        std::unique_ptr<std::atomic<int>[]> next;
        int room = 0;  // of `next`
        std::atomic<uint64_t> state{0};
    };

    Program& program(long number) { return programs_[number % PROGRAMS]; }
    void work(int thread);
    void take_part(Program& program, int first, int thread);
    void meet(Program& program, int operation);

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::array<Program, PROGRAMS> programs_;
    std::atomic<long> started_{0};  // counts programs; a worker runs each once
    long finished_ = 0;             // the caller's: programs it has waited for
    std::atomic<bool> closing_{false};
};

}  // namespace troth
