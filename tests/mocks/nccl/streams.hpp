// Streams and events over host threads: what stands for the CUDA runtime.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace mock_nccl {

// Starts a detached thread that no signal of the program reaches.
void start_thread(std::function<void()> body);

// A point in a stream that is reached once.
class Mark {
  public:
    void set();
    void wait();
    bool reached();
    std::chrono::steady_clock::time_point when();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool reached_ = false;
    std::chrono::steady_clock::time_point when_;
};

class Stream;

// What a graph captures: tasks in the order in which they were given, over all streams that are part of it.
struct Capture {
    using Node = std::function<void(const std::shared_ptr<Stream>&)>;  // puts it into the launching stream
    std::vector<Node> nodes;
    bool invalid = false;
    Stream* origin = nullptr;
    // Of each stream in it: how many nodes it has given, and how many of the others' it comes after.
    std::map<Stream*, std::map<Stream*, size_t>> after;
    std::vector<std::shared_ptr<Stream>> streams;
};

// Runs tasks one after the other in a thread of its own, which ends when it has long had nothing to do.
class Stream : public std::enable_shared_from_this<Stream> {
  public:
    using Task = std::function<void()>;
    void enqueue(Task task);
    // Captured like a task, but put into the launching stream by itself.
    void capture_node(Capture::Node node);
    std::shared_ptr<Capture> capture();  // null when it runs
    void set_capture(std::shared_ptr<Capture> capture);
    bool idle();
    void synchronize();
    // No more tasks will come: the thread ends after the last one.
    void release();

  private:
    void work();
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Task> tasks_;
    std::shared_ptr<Capture> capture_;
    bool thread_ = false, busy_ = false, released_ = false;
};

// NULL is the calling thread's default stream; null for a handle that is no live stream.
std::shared_ptr<Stream> find_stream(void* handle);

// The device that the calling thread has set; a label only.
int current_device();

// Whether an address is in memory of a library's, which stands for a device's; null without such a library.
extern bool (*is_library_memory)(const void* address);

}  // namespace mock_nccl
