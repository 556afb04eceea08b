// What one decode step leaves to the next where the host does not look in between: the tokens that it drew.
#pragma once

#include <cstdint>
#include <cstring>

#include "pool.h"

namespace troth {

constexpr int64_t ON_DEVICE = -1;  // stands for a row's last token, as in contracts/plan.py

struct FeedArguments {
    const void* staged;      // what the host wrote for this step
    void* inputs;            // where its operations read it
    size_t bytes;
    int64_t* tokens;         // [count], among the inputs
    const int64_t* rows;     // [count], among the inputs
    const int64_t* last;     // by row: the token it drew last
    int count;
};

// The numbers of a step go to where its operations look for them; tokens that the host does not know come from the draws.
inline void feed(const void* arguments, Turn turn) {
    const auto& a = *(const FeedArguments*)arguments;
    if (turn.take(1) < 0) return;
    memcpy(a.inputs, a.staged, a.bytes);
    for (int i = 0; i < a.count; i++)
        if (a.tokens[i] == ON_DEVICE) a.tokens[i] = a.last[a.rows[i]];
}

struct NoteArguments {
    const int64_t* tokens;   // [count]
    const int64_t* rows;     // [count], each at most once
    int64_t* last;           // by row
    int count;
};

// Remembers what was drawn for each row.
inline void note(const void* arguments, Turn turn) {
    const auto& a = *(const NoteArguments*)arguments;
    if (turn.take(1) < 0) return;
    for (int i = 0; i < a.count; i++) a.last[a.rows[i]] = a.tokens[i];
}

}  // namespace troth
