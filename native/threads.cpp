// Who helps a caller with its shares: the threads of OpenMP, which are torch's as well, or a few of our own.
//
// Threads of OpenMP spin for milliseconds after each call. On a quiet machine that makes them the quickest help, and
// any others would have to share their cores with them. Where other processes want the cores too, the scheduler counts
// the spinning as work: the threads have used up their turns when they are called, and OpenMP makes the caller wait for
// each of them, even if nothing is left to do. So when one came late, for a while threads of our own are called, which
// sleep when they have nothing to do and are waited for only where they have begun something.
#include "threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tb {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr microseconds late{1'000};         // a thread that has its core comes in a tenth of this
constexpr microseconds busy_for{1'000'000};  // after one came late
constexpr microseconds short_wait{50};      // about what sleeping and being woken takes

// std::atomic's own wait yields the core before it sleeps, which Linux takes for giving up a whole turn.
void sleep_while(const std::atomic<int>& number, int value) {
#ifdef __linux__
  syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  number.wait(value);
#endif
}

void wake_all(std::atomic<int>& number) {
#ifdef __linux__
  syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  number.notify_all();
#endif
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// What several threads count, and wait for: awake as long as their patience lasts, then asleep.
class Count {
 public:
  int add() { return number_.fetch_add(1); }

  void add_towards(int goal) {
    if (add() + 1 == goal) wake_all(number_);
  }

  bool reached(int goal) const { return number_ >= goal; }

  void wait_for(int goal, microseconds patience) const {
    if (reached(goal)) return;
    const auto end = Clock::now() + patience;
    while (Clock::now() < end) {
      for (int i = 0; i < 16; ++i) {
        if (reached(goal)) return;
        relax();
      }
    }
    for (int number = number_; number < goal; number = number_) sleep_while(number_, number);
  }

 private:
  alignas(64) std::atomic<int> number_ = 0;
};

// One call's shares and how far they are. Who comes when all are taken touches nothing that the caller owns.
class Work {
 public:
  Work(std::vector<Step> steps, int shares, microseconds patience)
      : steps_(std::move(steps)), shares_(shares), patience_(patience), progress_(new Progress[steps_.size()]) {}

  void take_part() {
    for (std::size_t s = 0; s < steps_.size(); ++s) {
      Progress& step = progress_[s];
      for (int share = step.taken.add(); share < shares_; share = step.taken.add()) {
        attempt(steps_[s], share);
        step.done.add_towards(shares_);
      }
      step.done.wait_for(shares_, patience_);
    }
  }

  bool finished() const { return steps_.empty() || progress_[steps_.size() - 1].done.reached(shares_); }

  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  struct Progress {
    Count taken, done;
  };

  void attempt(const Step& step, int share) {
    if (failed_) return;
    try {
      step(share);
    } catch (...) {
      if (!failed_.exchange(true)) failure_ = std::current_exception();
    }
  }

  const std::vector<Step> steps_;
  const int shares_;
  const microseconds patience_;
  const std::unique_ptr<Progress[]> progress_;
  std::atomic<bool> failed_ = false;
  std::exception_ptr failure_;
};

// Threads that sleep until they are called. Nobody depends on their coming: in a forked process, where they are gone,
// and while another caller has them, a caller does its work alone.
class Helpers {
 public:
  void call(const std::shared_ptr<Work>& work, int wanted) {
    const std::unique_lock<std::mutex> lock(guard_, std::try_to_lock);
    if (!lock || (work_ && !work_->finished())) return;
    work_ = work;
    places_ = wanted;
    try {
      for (; helpers_ < wanted; ++helpers_) std::thread(&Helpers::serve, this, calls_.load()).detach();
    } catch (const std::system_error&) {  // those that there are will do
    }
    ++calls_;
    wake_all(calls_);
  }

 private:
  void serve(int seen) {
    for (;;) {
      while (calls_ == seen) sleep_while(calls_, seen);
      seen = calls_;
      if (const auto work = next()) work->take_part();
    }
  }

  std::shared_ptr<Work> next() {
    const std::lock_guard<std::mutex> lock(guard_);
    return places_-- > 0 ? work_ : nullptr;
  }

  std::mutex guard_;
  std::shared_ptr<Work> work_;
  int places_ = 0, helpers_ = 0;
  std::atomic<int> calls_ = 0;
};

std::atomic<std::int64_t> busy_until = 0;  // in ticks of the clock

std::int64_t ticks(Clock::duration after = {}) { return (Clock::now() + after).time_since_epoch().count(); }

#ifdef _OPENMP
void run_with_openmp(Work& work, int threads) {
  const std::int64_t in_time = ticks(late);
  Count left;
#pragma omp parallel num_threads(threads)
  {
    const bool caller = omp_get_thread_num() == 0;
    const int others = omp_get_num_threads() - 1;
    if (!caller && ticks() > in_time) busy_until = ticks(busy_for);
    work.take_part();
    // Where the region ends OpenMP waits for all, awake; here the caller does, asleep if need be.
    if (caller) {
      left.wait_for(others, late);
    } else {
      left.add_towards(others);
    }
  }
}

void run_with_helpers(const std::shared_ptr<Work>& work, int threads) {
  static Helpers& helpers = *new Helpers;  // never destroyed, as its threads do not end
  helpers.call(work, threads - 1);
  work->take_part();
}
#endif

}  // namespace

void run(std::vector<Step> steps, int shares, int threads) {
#ifdef _OPENMP
  threads = std::min(threads, shares);
  if (threads > 1 && !omp_in_parallel()) {
    const bool busy = ticks() < busy_until;
    const auto work = std::make_shared<Work>(std::move(steps), shares, busy ? short_wait : late);
    if (busy) {
      run_with_helpers(work, threads);
    } else {
      run_with_openmp(*work, threads);
    }
    return work->rethrow();
  }
#endif
  (void)threads;
  for (const Step& step : steps) {
    for (int share = 0; share < shares; ++share) step(share);
  }
}

void expect_busy_cores(double seconds) {
  busy_until = ticks(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

}  // namespace tb
