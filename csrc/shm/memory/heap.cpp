// The process's shared heap, and mappings of those of other processes.
#include "shm/memory/heap.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <string>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "shm/memory/shared_file.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kPage = 4096, kSmall = 64;

std::atomic<Heap*> current{nullptr};
std::mutex making;
[[maybe_unused]] const bool registered = (keep_over_fork<making>(), true);

uint64_t up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

}  // namespace

Heap& Heap::mine() {
    int pid = getpid();
    Heap* heap = current.load(std::memory_order_acquire);
    if (heap && heap->pid_ == pid) return *heap;
    std::lock_guard lock(making);
    heap = current.load(std::memory_order_acquire);
    if (heap && heap->pid_ == pid) return *heap;
    heap = new Heap();  // never freed: tensors may outlive everything else
    current.store(heap, std::memory_order_release);
    return *heap;
}

bool Heap::holds(const void* data, uint64_t bytes) {
    const Heap* heap = current.load(std::memory_order_acquire);
    if (!heap) return false;
    auto at = reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(heap->base_);
    return at < heap->size_ && bytes <= heap->size_ - at && heap->pid_ == getpid();
}

Heap::Heap() : pid_(getpid()) {
    size_ = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
    fd_ = make_shared_file("unicomm-tensors", "memory of tensors", size_);
    void* mem = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (mem == MAP_FAILED) {
        close(fd_);
        throw_errno("cannot map the memory for shared tensors");
    }
    base_ = static_cast<char*>(mem);
    free_.give(0, size_);
}

void* Heap::allocate(uint64_t bytes) {
    // Large blocks take whole pages, so that the pages can be returned to the system.
    uint64_t align = bytes >= kPage ? kPage : kSmall;
    bytes = up(std::max<uint64_t>(bytes, 1), align);
    std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
        if (up(it->first, align) + bytes > it->first + it->second) continue;
        if (best == free_.end() || it->second < best->second) best = it;
    }
    if (best == free_.end()) throw std::bad_alloc();
    uint64_t at = up(best->first, align);
    free_.take(best, at, bytes);
    blocks_[at] = bytes;
    allocated_ += bytes;
    return base_ + at;
}

void Heap::release(void* data) {
    if (!holds(data, 1)) return;
    Heap& heap = *current.load(std::memory_order_acquire);
    heap.take_back(heap.offset(data));
}

void Heap::take_back(uint64_t from) {
    std::lock_guard lock(mutex_);
    auto block = blocks_.find(from);
    if (block == blocks_.end()) return;
    auto [at, bytes] = *block;
    blocks_.erase(block);
    allocated_ -= bytes;
    if (bytes >= kPage) {  // the pages belong to this block alone
        fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(at), off_t(bytes));
    }
    free_.give(at, bytes);
}

uint64_t Heap::allocated() {
    std::lock_guard lock(mutex_);
    return allocated_;
}

PeerHeap::PeerHeap(int pid, int fd, uint64_t size) : size_(size) {
    std::string who = "process " + std::to_string(pid);
    uint64_t bytes = 0;
    int mine = open_shared_file(pid, fd, false, "memory of tensors", bytes);
    if (bytes != size || size == 0) {
        close(mine);
        throw SystemFailure(who + " offered memory of tensors of another size");
    }
    void* mem = mmap(nullptr, size, PROT_READ, MAP_SHARED | MAP_NORESERVE, mine, 0);
    close(mine);
    if (mem == MAP_FAILED) throw_errno("cannot map the tensors of " + who);
    madvise(mem, size, MADV_DONTDUMP);  // a core dump holds only the memory of its own process
    base_ = static_cast<const char*>(mem);
}

PeerHeap::~PeerHeap() { munmap(const_cast<char*>(base_), size_); }

}  // namespace unicomm::shm
