// A thread pool for programs of many short operations with a barrier after each.
//
// The calling thread takes part. Workers spin for a few microseconds between operations, because a decode step has
// hundreds of them, and sleep between programs, so that they do not take cores from torch or from other processes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace troth {

// What an operation is given: which thread it runs on, and a way to share out work.
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

// One operation: called by every thread; its arguments stay valid until the program has ended.
struct Operation {
    void (*run)(const void* arguments, Turn turn);
    const void* arguments;
};

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return (int)workers_.size() + 1; }

    // Run the operations in order, all threads on each, and return when the last has ended. One caller at a time.
    void run(const Operation* operations, int count);

private:
    void work(int thread);
    void share(int thread);
    void meet();

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<long> program_{0};   // counts programs; a worker runs each once
    bool closing_ = false;
    const Operation* operations_ = nullptr;
    int count_ = 0;
    std::vector<std::atomic<int>> next_;
    std::atomic<int> arrived_{0};
    std::atomic<int> round_{0};
};

}  // namespace troth
