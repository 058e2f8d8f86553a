// Work cut into shares, which threads take as they come.
#pragma once

#include <functional>
#include <vector>

namespace tb {

using Step = std::function<void(int share)>;

// Every step for every share from 0 to `shares`, a step after all shares of the one before it, by the caller and up to
// threads - 1 others. A share is computed by whoever is free: a thread that lost its core to another process holds up
// what it has begun and nothing else. Rethrows what a share has thrown.
void run(std::vector<Step> steps, int shares, int threads);

// Lets callers be helped, for so long from now, as where other processes keep the cores busy. For tests.
void expect_busy_cores(double seconds);

}  // namespace tb
