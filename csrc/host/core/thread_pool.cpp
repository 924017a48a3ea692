#include "core/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace kunlun {
namespace {

using Clock = std::chrono::steady_clock;

thread_local int tls_index = 0;
thread_local bool tls_inside = false;

void pin_current_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // best effort: a cgroup may forbid it
}

struct Job {
  void (*body)(void*, int64_t) = nullptr;
  void* context = nullptr;
  int64_t num_tasks = 0;
};

// The ticket holds the job's number in its high half and the tasks not yet claimed in its low half. A task is claimed
// by lowering the low half, so a thread that wakes late finds nothing to claim and is not waited for: run() returns
// when every claimed task is done. The job's fields change only while no task is claimed.
class Pool {
 public:
  Pool(int threads, const std::vector<int>& cpus, int64_t spin_us) : spin_(spin_us) {
    for (int i = 1; i < threads; ++i) {
      const int cpu = i < static_cast<int>(cpus.size()) ? cpus[i] : -1;
      workers_.emplace_back([this, i, cpu] { work(i, cpu); });
    }
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(const Job& job) {
    if (workers_.empty() || job.num_tasks == 1 || job.num_tasks > kLow || tls_inside || !serial_.try_lock()) {
      return run_serially(job);
    }
    job_ = job;
    unfinished_.store(job.num_tasks, std::memory_order_relaxed);
    publish(static_cast<uint64_t>(job.num_tasks));
    drain();
    while (unfinished_.load(std::memory_order_acquire) != 0) pause();
    serial_.unlock();
  }

 private:
  static constexpr int64_t kLow = 0xffffffff;

  static void pause() { __builtin_ia32_pause(); }

  static void run_serially(const Job& job) {
    for (int64_t i = 0; i < job.num_tasks; ++i) job.body(job.context, i);
  }

  bool has_work() const { return (ticket_.load(std::memory_order_seq_cst) & kLow) != 0; }

  void publish(uint64_t num_tasks) {
    ticket_.store((++job_number_ << 32) | num_tasks, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  // Claims a task of the present job; false when all are claimed.
  bool claim(int64_t* index) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while ((ticket & kLow) != 0) {
      if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) {
        *index = job_.num_tasks - static_cast<int64_t>(ticket & kLow);
        return true;
      }
    }
    return false;
  }

  void drain() {
    tls_inside = true;
    for (int64_t index = 0; claim(&index);) {
      job_.body(job_.context, index);
      unfinished_.fetch_sub(1, std::memory_order_release);
    }
    tls_inside = false;
  }

  void wait_for_work() {
    const auto until = Clock::now() + std::chrono::microseconds(spin_);
    do {
      for (int i = 0; i < 64; ++i) {
        if (has_work() || stopping_) return;
        pause();
      }
    } while (Clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return has_work() || stopping_; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void work(int index, int cpu) {
    tls_index = index;
    if (cpu >= 0) pin_current_thread(cpu);
    while (!stopping_) {
      wait_for_work();
      drain();
    }
  }

  int64_t spin_;
  std::vector<std::thread> workers_;
  std::mutex serial_;
  std::mutex mutex_;
  std::condition_variable wake_;
  uint64_t job_number_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  Job job_;
};

std::unique_ptr<Pool>& pool() {
  static std::unique_ptr<Pool> instance = std::make_unique<Pool>(1, std::vector<int>{}, 0);
  return instance;
}

// A forked child has no worker threads: it must not wait for them, nor join them.
void abandon_pool_in_child() {
  pool().release();
  pool() = std::make_unique<Pool>(1, std::vector<int>{}, 0);
}

}  // namespace

void configure_threads(int threads, const std::vector<int>& cpus, int64_t spin_us) {
  static const int registered = pthread_atfork(nullptr, nullptr, abandon_pool_in_child);
  (void)registered;
  pool() = std::make_unique<Pool>(threads, cpus, spin_us);
  if (!cpus.empty()) pin_current_thread(cpus[0]);
}

int num_threads() { return pool()->size(); }

int thread_index() { return tls_index; }

namespace detail {
void run(int64_t num_tasks, void (*body)(void*, int64_t), void* context) { pool()->run(Job{body, context, num_tasks}); }
}  // namespace detail

}  // namespace kunlun
