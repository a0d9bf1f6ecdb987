// The memory that the ranks of a shm communicator share, and its layout.
//
// It is a memfd: anonymous, and opened by the other ranks through /proc/PID/fd while the creator holds it. It
// has no name in any file system, so nothing is left behind if a process is killed, and it does not count
// against the size of /dev/shm, which containers keep small.
#pragma once
#include <cstdint>

#include "base/simulation.hpp"
#include "shm/memory/checksum.hpp"

namespace unicomm::shm {

constexpr uint64_t kMagic = 0x334d485343494e55ull;  // "UNICSHM3"
constexpr int kLine = 64;

// What a rank publishes at the start of a round. Each rank has two, used in turn.
struct alignas(128) Announcement {
    Shared<uint64_t> round;  // with checksum; written last, when the slot is filled
    uint64_t signature;
    double factor;  // the factor of PREMUL_SUM
    uint64_t count;
    uint64_t extra;
    uint32_t op_dtype_red;
    int32_t root;
    uint64_t longest;         // bytes of the longest buffer that this rank sends: sets the number of rounds
    uint32_t disagrees_with;  // 1 + the rank whose sizes differ from mine, or 0; and the complement of that
    uint32_t offered;         // a tag of the round: the data are in the heap, at inline_data (an Offer); or 0
    char inline_data[64];     // small payloads are sent in the announcement
};
static_assert(sizeof(Announcement) == 128);

// Where a rank's tensor is in its heap (heap.hpp).
struct Offer {
    uint64_t at;
    uint64_t heap_size;
    int64_t heap_fd;
    uint64_t checksum;  // of the fields above
    uint64_t expected_checksum() const { return checksum_of(at, heap_size, uint64_t(heap_fd), 0); }
};
static_assert(sizeof(Offer) <= sizeof(Announcement::inline_data));

enum class RankState : uint32_t { kAbsent = 0, kHere = 1, kFinalized = 2, kFailed = 3 };

struct alignas(128) RankControl {
    Shared<uint32_t> state;
    Shared<uint32_t> sleeping;   // the rank waits in the kernel and wants to be woken
    Shared<uint32_t> doorbell;   // futex word; counts wakes
    Shared<uint32_t> fault;      // for kFailed: the FaultCode ...
    Shared<int32_t> fault_rank;  // ... and its first culprit
    Shared<uint32_t> pid;        // of its process; 0: not known yet
    // While the rank waits in the kernel, for culprits.hpp:
    Shared<uint32_t> waits_for;    // 1 + the awaited rank; 0: none
    Shared<uint32_t> wait;         // counts the waits
    Shared<uint32_t> looks;        // counts how often the rank checked and had to go on waiting
    Shared<uint32_t> core;         // 1 + the core where it was when it last told; 0: it has not
    Shared<uint64_t> patience_us;  // with checksum; until when the others are to wait, CLOCK_MONOTONIC
    Shared<uint64_t> culprits[8];  // for kFailed: one bit per culprit, for the first ranks
    Shared<uint64_t> wait_table;   // the id of the wait table of its process; 0: none
    Shared<int32_t> wait_table_fd;
};
static_assert(sizeof(RankControl) == 128);

struct alignas(128) SegmentHeader {
    uint64_t magic;
    uint64_t bytes;
    int32_t world;
    uint32_t slot_bytes;
    uint32_t p2p_chunk;
    uint32_t p2p_depth;
    uint64_t id;                             // random
    alignas(128) Shared<uint32_t> sleepers;  // number of sleeping ranks; usually 0, which saves a scan
    Shared<uint32_t> failures;               // number of ranks that gave up
};

// One direction of a pair: a ring of `p2p_depth` chunks.
struct alignas(128) Channel {
    Shared<uint64_t> head;  // with checksum: chunks written
    // The receiver writes these two seldom, and the sender looks at them for each chunk: they are in its
    // line.
    Shared<uint64_t> rejected;  // with checksum: 1 + number of the message that the receiver refused
    // With checksum: 1 + number of the message that the receiver could not read in the sender's process.
    Shared<uint64_t> unreadable;
    char pad[kLine - 24];
    Shared<uint64_t> tail;  // with checksum: chunks read
};
static_assert(sizeof(Channel) == 2 * kLine);
constexpr uint64_t kInItsProcess = ~uint64_t{0};
struct ChunkHeader {
    uint64_t message;  // number of the message in this channel, from 0
    uint64_t total;    // bytes of the whole message
    uint64_t count;
    uint32_t dtype;
    uint32_t bytes;  // of this chunk
    // As in Offer; heap_size > 0: the whole message is there. kInItsProcess: at this address of the sender.
    uint64_t at, heap_size;
    int32_t heap_fd;
    uint32_t tag;
    uint64_t checksum;  // of the fields above and the number of the chunk; `head` is written after it
    uint64_t expected_checksum(uint64_t number) const {
        return checksum_of(checksum_of(number, message, total, count),
                           checksum_of(at, heap_size, uint32_t(heap_fd), tag), uint64_t(dtype) << 32 | bytes,
                           1) |
               1;
    }
};
static_assert(sizeof(ChunkHeader) == kLine);

// Bytes of a ring of chunks whose lines have left the receiver's own caches by the time they are written
// again: a store to a line that another core holds takes several times as long.
constexpr uint64_t kLargeRing = 1024 * 1024;

struct Layout {
    int world;
    uint32_t slot_bytes, p2p_chunk, p2p_depth;
    uint64_t controls, announcements, slots, channels, chunks, bytes;
    static Layout plan(int world, uint32_t slot_bytes, uint32_t p2p_bytes);
    uint64_t end_of_chunks() const;
};

class Segment {
  public:
    // Creates the memfd; the other ranks open `fd()`.
    Segment(int world, uint32_t slot_bytes, uint32_t p2p_bytes);
    // Maps what process `pid` holds as `fd`.
    Segment(int pid, int fd);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    void close_fd();  // to be called once all ranks have mapped it
    int fd() const { return fd_; }
    const Layout& layout() const { return layout_; }
    uint64_t id() const { return id_; }

    SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(base_); }
    RankControl& control(int rank) { return at<RankControl>(layout_.controls)[rank]; }
    Announcement& announcement(int rank, uint64_t round) {
        return at<Announcement>(layout_.announcements)[2 * rank + static_cast<int>(round & 1)];
    }
    char* slot(int rank, uint64_t round) {
        return base_ + layout_.slots + (2 * uint64_t(rank) + (round & 1)) * layout_.slot_bytes;
    }
    Channel& channel(int from, int to) {
        return at<Channel>(layout_.channels)[uint64_t(from) * layout_.world + to];
    }
    char* chunk(int from, int to, uint64_t number) {
        uint64_t stride = kLine + layout_.p2p_chunk;
        uint64_t pair = uint64_t(from) * (layout_.world - 1) + to - (to > from);  // no rank sends to itself
        return base_ + layout_.chunks + (pair * layout_.p2p_depth + number % layout_.p2p_depth) * stride;
    }

  private:
    template <class T>
    T* at(uint64_t offset) {
        return reinterpret_cast<T*>(base_ + offset);
    }
    void map();

    Layout layout_{};
    uint64_t id_ = 0;
    int fd_ = -1;
    char* base_ = nullptr;
};

}  // namespace unicomm::shm
