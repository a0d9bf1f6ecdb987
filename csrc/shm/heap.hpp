// Memory of this process that the other ranks of a host can read: tensors in it need no staging copy.
//
// One heap a process, made at the first allocation: a memfd as large as the machine's memory, mapped once,
// whose pages exist from when they are touched until they are given back. Its offsets therefore never
// change, and another process that has opened it through /proc/PID/fd sees every later allocation too: an
// allocation tells nobody anything. The file can neither shrink nor grow (it is sealed), so that a reader's
// mapping stays good whatever its owner does.
//
// Others only ever read it. A rank that has given up on an operation may use its tensors again at once, and a
// late peer that could write into them would spoil them.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "core/free_spans.hpp"

namespace unicomm::shm {

class Heap {
  public:
    // The process's own; made at the first call, and anew in a forked child, whose parent's tensors are then
    // memory like any other.
    static Heap& mine();
    // Whether all of it lies in the heap of this process. Never makes one.
    static bool holds(const void* data, uint64_t bytes);

    Heap(const Heap&) = delete;
    Heap& operator=(const Heap&) = delete;

    // At least 64-byte aligned. Throws std::bad_alloc.
    void* allocate(uint64_t bytes);
    // From any thread. What a forked child has of its parent's heap stays.
    static void release(void* data);

    uint64_t offset(const void* data) const { return uint64_t(static_cast<const char*>(data) - base_); }
    int fd() const { return fd_; }
    uint64_t size() const { return size_; }
    const char* base() const { return base_; }
    uint64_t allocated();  // bytes of what is in use

  private:
    Heap();
    void take_back(uint64_t from);

    int pid_, fd_ = -1;
    char* base_ = nullptr;
    uint64_t size_ = 0;
    std::mutex mutex_;
    FreeSpans free_;
    std::map<uint64_t, uint64_t> blocks_;  // in use
    uint64_t allocated_ = 0;
};

// Another process's heap, for reading.
class PeerHeap {
  public:
    PeerHeap(int pid, int fd, uint64_t size);  // throws SystemFailure
    ~PeerHeap();
    PeerHeap(const PeerHeap&) = delete;
    PeerHeap& operator=(const PeerHeap&) = delete;
    const char* base() const { return base_; }
    uint64_t size() const { return size_; }

  private:
    const char* base_ = nullptr;
    uint64_t size_;
};

}  // namespace unicomm::shm
