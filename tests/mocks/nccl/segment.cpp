#include "segment.hpp"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace mock_nccl {
namespace {

constexpr int kSlots = 4;
constexpr size_t kChunk = 32 * 1024;

struct Slot {
    uint64_t total;  // of the message, in each of its chunks
    uint32_t bytes;
    Signature signature;
    char data[kChunk];
};

struct Pipe {
    alignas(64) std::atomic<uint32_t> head;
    alignas(64) std::atomic<uint32_t> tail;
    Slot slots[kSlots];
};

struct alignas(64) RankInfo {
    std::atomic<uint32_t> presence;
    std::atomic<uint32_t> bell;
    std::atomic<uint32_t> waiting;
    std::atomic<int32_t> pid;
    std::atomic<uint64_t> signals[kMaxRanks][kSignals];
};

long futex(std::atomic<uint32_t>& word, int what, uint32_t value, const timespec* time) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), what, value, time, nullptr, 0);
}

}  // namespace

// All zero is a valid beginning, so that whoever comes first has nothing to prepare.
struct Segment::Shared {
    std::atomic<int32_t> nranks;
    std::atomic<int32_t> arrived;
    RankInfo ranks[kMaxRanks];
    Pipe pipes[kLanes][kMaxRanks][kMaxRanks];
};

std::shared_ptr<Segment> Segment::open(const std::string& name, std::string* error) {
    int fd = shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    void* memory = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, sizeof(Shared)) == 0)
        memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) *error = "shared memory " + name + ": " + strerror(errno);
    if (fd >= 0) close(fd);
    if (memory == MAP_FAILED) return nullptr;
    auto segment = std::make_shared<Segment>();
    segment->name_ = name;
    segment->shared_ = static_cast<Shared*>(memory);
    return segment;
}

Segment::~Segment() {
    if (shared_) munmap(shared_, sizeof(Shared));
}

bool Segment::attach(int nranks, int rank, std::string* error) {
    int32_t known = 0;
    if (!shared_->nranks.compare_exchange_strong(known, nranks) && known != nranks) {
        *error = "rank " + std::to_string(rank) + " says " + std::to_string(nranks) +
                 " ranks, another rank says " + std::to_string(known);
        return false;
    }
    RankInfo& me = shared_->ranks[rank];
    uint32_t absent = kAbsent;
    if (!me.presence.compare_exchange_strong(absent, kPresent)) {
        *error = "rank " + std::to_string(rank) + " has joined this unique id already";
        return false;
    }
    me.pid = getpid();
    if (shared_->arrived.fetch_add(1) + 1 == nranks) unlink();
    ring_all();
    return true;
}

bool Segment::complete(int nranks) const { return shared_->arrived.load() >= nranks; }
void Segment::unlink() { shm_unlink(name_.c_str()); }
int Segment::pid(int rank) const { return shared_->ranks[rank].pid.load(); }
uint32_t Segment::bell(int rank) const { return shared_->ranks[rank].bell.load(); }
std::atomic<uint64_t>& Segment::signals(int to, int from, int index) {
    return shared_->ranks[to].signals[from][index];
}

Presence Segment::presence(int rank) const {
    return static_cast<Presence>(shared_->ranks[rank].presence.load());
}

void Segment::set_presence(int rank, Presence state) {
    shared_->ranks[rank].presence = state;
    ring_all();
}

void Segment::ring(int rank) {
    RankInfo& r = shared_->ranks[rank];
    r.bell.fetch_add(1);
    if (r.waiting.load()) futex(r.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

void Segment::ring_all() {
    for (int rank = 0; rank < kMaxRanks; ++rank)
        if (presence(rank) != kAbsent) ring(rank);
}

void Segment::wait(int rank, uint32_t seen, int ms) {
    RankInfo& r = shared_->ranks[rank];
    timespec time{ms / 1000, ms % 1000 * 1000000L};
    r.waiting.fetch_add(1);
    if (r.bell.load() == seen) futex(r.bell, FUTEX_WAIT, seen, &time);
    r.waiting.fetch_sub(1);
}

Transfer Transfer::send(Lane lane, int me, int to, const void* data, size_t bytes, bool until_taken) {
    Transfer t;
    t.lane_ = lane, t.me_ = me, t.peer_ = to, t.sending_ = true, t.until_taken_ = until_taken;
    t.data_ = static_cast<char*>(const_cast<void*>(data)), t.bytes_ = bytes;
    return t;
}

Transfer Transfer::receive(Lane lane, int me, int from, void* data, size_t bytes) {
    Transfer t;
    t.lane_ = lane, t.me_ = me, t.peer_ = from, t.sending_ = false;
    t.data_ = static_cast<char*>(data), t.bytes_ = bytes;
    return t;
}

bool Transfer::step(Segment& segment, const Signature& mine) {
    if (done_) return false;
    bool moved = sending_ ? step_send(segment, mine) : step_receive(segment, mine);
    if (moved) segment.ring(peer_);
    return moved || done_;
}

bool Transfer::step_send(Segment& segment, const Signature& mine) {
    Pipe& pipe = segment.shared()->pipes[lane_][me_][peer_];
    bool any = false;
    uint32_t head = pipe.head.load(std::memory_order_relaxed);
    // An empty message is one empty chunk.
    for (; !written_ && head - pipe.tail.load(std::memory_order_acquire) < kSlots; any = true) {
        Slot& slot = pipe.slots[head % kSlots];
        slot.total = bytes_;
        slot.bytes = static_cast<uint32_t>(std::min(kChunk, bytes_ - moved_));
        slot.signature = mine;
        memcpy(slot.data, data_ + moved_, slot.bytes);
        moved_ += slot.bytes;
        written_ = moved_ == bytes_;
        end_ = ++head;
        pipe.head.store(head, std::memory_order_release);
    }
    if (written_)
        done_ = !until_taken_ || static_cast<int32_t>(pipe.tail.load(std::memory_order_acquire) - end_) >= 0;
    return any;
}

bool Transfer::step_receive(Segment& segment, const Signature& mine) {
    Pipe& pipe = segment.shared()->pipes[lane_][peer_][me_];
    bool any = false;
    uint32_t tail = pipe.tail.load(std::memory_order_relaxed);
    for (; !done_ && pipe.head.load(std::memory_order_acquire) != tail; any = true) {
        const Slot& slot = pipe.slots[tail % kSlots];
        if (!started_) {
            started_ = true;
            total_ = slot.total;
            theirs_ = slot.signature;
            mismatch_ = total_ != bytes_ || memcmp(&theirs_, &mine, sizeof mine) != 0;
        }
        if (moved_ < bytes_) memcpy(data_ + moved_, slot.data, std::min<size_t>(slot.bytes, bytes_ - moved_));
        moved_ += slot.bytes;
        done_ = moved_ >= total_;
        pipe.tail.store(++tail, std::memory_order_release);
    }
    return any;
}

bool Transfer::take_mismatch(Signature* theirs) {
    if (!mismatch_) return false;
    mismatch_ = false;
    *theirs = theirs_;
    return true;
}

}  // namespace mock_nccl
