#include "pool.h"

#if !defined(_WIN32)
#include <pthread.h>
#include <signal.h>
#endif

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace onnxport {
namespace {

// How often the caller looks whether the helpers' last rows are done before it sleeps, some
// hundred microseconds in all: a row takes less, and to be woken costs about as much.
constexpr int kPatience = 20'000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// One call that helpers may join; it lies on the caller's stack.
struct Job {
  Work work;
  void* argument;
  int64_t wanted;  // helpers that may still join
  std::atomic<int64_t> active{0};
  Job* next = nullptr;
};

#if !defined(_WIN32)
// A thread that starts blocks all signals, which are the program's.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};
#else
struct SignalsBlocked {};
#endif

class Pool {
 public:
  void run(Job& job) {
    const int64_t helpers = job.wanted;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      start_threads(helpers);
      job.next = jobs_;
      jobs_ = &job;
    }
    for (int64_t i = 0; i < helpers; i++) wake_.notify_one();
    job.work(job.argument);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      remove(job);
    }
    for (int i = 0; i < kPatience && job.active.load(std::memory_order_acquire); i++) relax();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return job.active.load(std::memory_order_acquire) == 0; });
  }

 private:
  // Where the system has no more threads or memory, the caller does what nobody helps with.
  void start_threads(int64_t wanted) {
    if (num_threads_ >= wanted) return;
    [[maybe_unused]] const SignalsBlocked blocked{};
    try {
      for (; num_threads_ < wanted; num_threads_++) std::thread([this] { help(); }).detach();
    } catch (const std::exception&) {
    }
  }

  void remove(Job& job) {
    Job** link = &jobs_;
    while (*link != &job) link = &(*link)->next;
    *link = job.next;
  }

  Job* open_job() const {
    Job* job = jobs_;
    while (job && job->wanted == 0) job = job->next;
    return job;
  }

  [[noreturn]] void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return (job = open_job()) != nullptr; });
      job->wanted--;
      job->active.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job->work(job->argument);
      lock.lock();
      // The last touch: the caller may return, and take the job with it.
      if (job->active.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* jobs_ = nullptr;
  int64_t num_threads_ = 0;
};

// Never destroyed: at the end of the process its threads still wait in it.
alignas(Pool) unsigned char memory[sizeof(Pool)];

#if !defined(_WIN32)
// In a forked child no helper is left, and whoever held the lock is gone.
void begin_anew() { new (memory) Pool; }
#endif

Pool& make_pool() {
  Pool* const made = new (memory) Pool;
#if !defined(_WIN32)
  pthread_atfork(nullptr, nullptr, begin_anew);
#endif
  return *made;
}

Pool& pool = make_pool();

}  // namespace

void run_together(Work work, void* argument, int64_t num_helpers) {
  if (num_helpers <= 0) return work(argument);
  Job job{work, argument, num_helpers};
  pool.run(job);
}

}  // namespace onnxport
