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

#include "core/ahead.h"

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
};

// A thread's tasks that are not yet claimed: the first one in the high half, the end in the low half.
struct alignas(64) Share {
  std::atomic<uint64_t> tasks{0};

  static uint64_t of(uint64_t begin, uint64_t end) { return begin << 32 | end; }
  static uint64_t begin(uint64_t tasks) { return tasks >> 32; }
  static uint64_t end(uint64_t tasks) { return tasks & 0xffffffff; }

  bool claim_first(int64_t* index) {
    uint64_t seen = tasks.load(std::memory_order_acquire);
    while (begin(seen) < end(seen)) {
      *index = static_cast<int64_t>(begin(seen));
      if (tasks.compare_exchange_weak(seen, of(begin(seen) + 1, end(seen)), std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  bool claim_last(int64_t* index) {
    uint64_t seen = tasks.load(std::memory_order_acquire);
    while (begin(seen) < end(seen)) {
      *index = static_cast<int64_t>(end(seen)) - 1;
      if (tasks.compare_exchange_weak(seen, of(begin(seen), end(seen) - 1), std::memory_order_acq_rel)) return true;
    }
    return false;
  }
};

// A claim succeeds only on tasks of the present job, so a thread that wakes late finds nothing to claim and is not
// waited for: run() returns when every task is done. The job's fields change only while no task is claimed.
class Pool {
 public:
  Pool(int threads, const std::vector<int>& cpus, int64_t spin_us) : spin_(spin_us), shares_(threads) {
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

  int size() const { return static_cast<int>(shares_.size()); }

  void run(const Job& job, int64_t num_tasks) {
    if (workers_.empty() || num_tasks == 1 || num_tasks > kMostTasks || tls_inside || !serial_.try_lock()) {
      for (int64_t i = 0; i < num_tasks; ++i) job.body(job.context, i);
      return;
    }
    job_ = job;
    unfinished_.store(num_tasks, std::memory_order_relaxed);
    publish(num_tasks);
    drain(0);
    while (unfinished_.load(std::memory_order_acquire) != 0) wait_a_little();
    serial_.unlock();
  }

 private:
  static constexpr int64_t kMostTasks = 0xffffffff;

  void publish(int64_t num_tasks) {
    for (int64_t i = 0; i < size(); ++i) {
      const uint64_t tasks = Share::of(num_tasks * i / size(), num_tasks * (i + 1) / size());
      shares_[i].tasks.store(tasks, std::memory_order_release);
    }
    jobs_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  // Claims a task, the thread's own in their order first; false when all are claimed.
  bool claim(int thread, int64_t* index) {
    if (shares_[thread].claim_first(index)) return true;
    for (int i = 1; i < size(); ++i) {
      if (shares_[(thread + i) % size()].claim_last(index)) return true;
    }
    return false;
  }

  void drain(int thread) {
    tls_inside = true;
    for (int64_t index = 0; claim(thread, &index);) {
      job_.body(job_.context, index);
      unfinished_.fetch_sub(1, std::memory_order_release);
    }
    tls_inside = false;
  }

  bool is_called(uint64_t jobs_seen) const { return jobs_.load(std::memory_order_seq_cst) != jobs_seen || stopping_; }

  void wait_for_job(uint64_t jobs_seen) {
    const auto until = Clock::now() + std::chrono::microseconds(spin_);
    do {
      for (int i = 0; i < 64; ++i) {
        if (is_called(jobs_seen)) return;
        wait_a_little();
      }
    } while (Clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return is_called(jobs_seen); });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  // Threads that wait fetch what the next kernels read.
  static void wait_a_little() {
    if (!fetch_ahead(4)) __builtin_ia32_pause();
  }

  void work(int index, int cpu) {
    tls_index = index;
    if (cpu >= 0) pin_current_thread(cpu);
    for (uint64_t seen = 0; !stopping_;) {
      wait_for_job(seen);
      seen = jobs_.load(std::memory_order_seq_cst);
      drain(index);
    }
  }

  int64_t spin_;
  std::vector<Share> shares_;
  std::vector<std::thread> workers_;
  std::mutex serial_;
  std::mutex mutex_;
  std::condition_variable wake_;
  alignas(64) std::atomic<uint64_t> jobs_{0};
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
void run(int64_t num_tasks, void (*body)(void*, int64_t), void* context) { pool()->run(Job{body, context}, num_tasks); }
}  // namespace detail

}  // namespace kunlun
