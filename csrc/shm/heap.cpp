#include "shm/heap.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <string>

#include "core/error.hpp"

namespace unicomm::shm {
namespace {

constexpr uint64_t kPage = 4096, kSmall = 64;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::atomic<Heap*> current{nullptr};
std::mutex making;

uint64_t up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

}  // namespace

Heap& Heap::mine() {
    int pid = getpid();
    Heap* heap = current.load(std::memory_order_acquire);
    if (heap && heap->pid_ == pid) return *heap;
    std::lock_guard lock(making);
    heap = current.load(std::memory_order_acquire);
    if (heap && heap->pid_ == pid) return *heap;
    heap = new Heap();  // for as long as the process lives: tensors may outlive everything else
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
    fd_ = memfd_create("unicomm-tensors", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) throw_errno("cannot create memory for shared tensors (memfd_create)");
    if (ftruncate(fd_, static_cast<off_t>(size_)) != 0 || fcntl(fd_, F_ADD_SEALS, kSeals) != 0) {
        close(fd_);
        throw_errno("cannot size the memory for shared tensors");
    }
    void* mem = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (mem == MAP_FAILED) {
        close(fd_);
        throw_errno("cannot map the memory for shared tensors");
    }
    base_ = static_cast<char*>(mem);
    free_[0] = size_;
}

void* Heap::allocate(uint64_t bytes) {
    // Whole pages for what is worth it, so that they can be given back.
    uint64_t align = bytes >= kPage ? kPage : kSmall;
    bytes = up(std::max<uint64_t>(bytes, 1), align);
    std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
        if (up(it->first, align) + bytes > it->first + it->second) continue;
        if (best == free_.end() || it->second < best->second) best = it;
    }
    if (best == free_.end()) throw std::bad_alloc();
    uint64_t from = best->first, end = from + best->second, at = up(from, align);
    free_.erase(best);
    if (at > from) free_[from] = at - from;
    if (at + bytes < end) free_[at + bytes] = end - at - bytes;
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
    if (bytes >= kPage) {  // its pages, which are its own
        fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(at), off_t(bytes));
    }
    auto next = free_.lower_bound(at);
    if (next != free_.end() && next->first == at + bytes) {
        bytes += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == at) {
            before->second += bytes;
            return;
        }
    }
    free_[at] = bytes;
}

uint64_t Heap::allocated() {
    std::lock_guard lock(mutex_);
    return allocated_;
}

PeerHeap::PeerHeap(int pid, int fd, uint64_t size) : size_(size) {
    std::string who = "process " + std::to_string(pid);
    std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    int mine = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (mine < 0) throw_errno("cannot open the tensors of " + who);
    struct stat info{};
    // Of another size, or one that could shrink, a read could end in SIGBUS.
    bool good = fstat(mine, &info) == 0 && uint64_t(info.st_size) == size && size > 0 &&
                (fcntl(mine, F_GET_SEALS) & kSeals) == kSeals;
    if (!good) {
        close(mine);
        throw SystemFailure(who + " offered something that is no memory of tensors");
    }
    void* mem = mmap(nullptr, size, PROT_READ, MAP_SHARED | MAP_NORESERVE, mine, 0);
    close(mine);
    if (mem == MAP_FAILED) throw_errno("cannot map the tensors of " + who);
    madvise(mem, size, MADV_DONTDUMP);  // a core dump holds one's own memory only
    base_ = static_cast<const char*>(mem);
}

PeerHeap::~PeerHeap() { munmap(const_cast<char*>(base_), size_); }

}  // namespace unicomm::shm
