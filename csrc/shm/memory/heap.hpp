// Memory of this process that the other ranks of the host can read: tensors in it need no staging copy.
//
// Each process has one heap, created at the first allocation: a memfd as large as the machine's memory,
// mapped once, whose pages exist from the first access until they are freed. So its offsets never change, and
// a process that has opened it through /proc/PID/fd also sees all later allocations; no allocation has to be
// announced. The file is sealed: it can neither shrink nor grow, so a mapping stays valid whatever the owner
// does.
//
// Other processes only read it. A rank that has given up an operation may reuse its tensors at once, and a
// late peer that could write into them would corrupt them.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/free_spans.hpp"

namespace unicomm::shm {

class Heap {
  public:
    // The heap of this process, created at the first call. A forked child creates its own; the tensors of its
    // parent are then ordinary memory.
    static Heap& mine();
    // Whether all of it lies in the heap of this process. Never creates the heap.
    static bool holds(const void* data, uint64_t bytes);

    Heap(const Heap&) = delete;
    Heap& operator=(const Heap&) = delete;

    // Returns memory aligned to at least 64 bytes. Throws std::bad_alloc.
    void* allocate(uint64_t bytes);
    // May be called from any thread. A forked child keeps what it has of its parent's heap.
    static void release(void* data);

    uint64_t offset(const void* data) const { return uint64_t(static_cast<const char*>(data) - base_); }
    int fd() const { return fd_; }
    uint64_t size() const { return size_; }
    const char* base() const { return base_; }
    uint64_t allocated();  // bytes in use

  private:
    Heap();
    void take_back(uint64_t from);

    int pid_, fd_ = -1;
    char* base_ = nullptr;
    uint64_t size_ = 0;
    std::mutex mutex_;
    FreeSpans free_;
    std::map<uint64_t, uint64_t> blocks_;  // blocks in use
    uint64_t allocated_ = 0;
};

// The heap of another process, mapped for reading.
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
