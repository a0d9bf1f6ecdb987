// The memory that the ranks of one shm communicator share, and its layout.
//
// It is a memfd: anonymous, opened by the others through /proc/PID/fd while the creator holds it. It has
// no name in any file system, so that no kill at any moment can leave one behind, and it does not count
// against the size of /dev/shm, which containers keep small.
#pragma once
#include <atomic>
#include <cstdint>

#include "shm/marked.hpp"

namespace unicomm::shm {

constexpr uint64_t kMagic = 0x324d485343494e55ull;  // "UNICSHM2"
constexpr int kLine = 64;

// What each rank publishes at the start of a round; two of them per rank, used in turn.
struct alignas(128) Announcement {
    std::atomic<uint64_t> round;  // marked; written last: the rank is in this round and its slot is filled
    uint64_t signature;
    double factor;  // of PREMUL_SUM
    uint64_t count;
    uint64_t extra;
    uint32_t op_dtype_red;
    int32_t root;
    uint64_t longest;  // bytes of the longest stream this rank will send: sets the number of rounds
    uint32_t
        disagrees_with;    // v-operations: 1 + the rank whose sizes do not fit mine, or 0; and its complement
    uint32_t offered;      // not 0, but of the round: the data are in the rank's heap, where inline_data (an
                           // Offer) says
    char inline_data[64];  // small payloads travel with the announcement
};
static_assert(sizeof(Announcement) == 128);

// Where a rank's tensor is in its heap (heap.hpp).
struct Offer {
    uint64_t at;
    uint64_t heap_size;
    int64_t heap_fd;
    uint64_t check;  // of these
    uint64_t checked() const { return check_of(at, heap_size, uint64_t(heap_fd), 0); }
};
static_assert(sizeof(Offer) <= sizeof(Announcement::inline_data));

enum class RankState : uint32_t { kAbsent = 0, kHere = 1, kFinalized = 2, kFailed = 3 };

struct alignas(128) RankControl {
    std::atomic<uint32_t> state;
    std::atomic<uint32_t> sleeping;   // the rank waits in the kernel and wants a wake
    std::atomic<uint32_t> doorbell;   // futex word, counts wakes
    std::atomic<uint32_t> fault;      // FaultCode behind kFailed ...
    std::atomic<int32_t> fault_rank;  // ... and its first culprit
    uint32_t pid;
    // While it waits in the kernel, so that the others see who waits for whom (waits.hpp):
    std::atomic<uint32_t> waits_for;    // 1 + a rank; 0: for none
    std::atomic<uint32_t> wait;         // counts the waits
    std::atomic<uint32_t> looks;        // counts how often it found that it has to go on waiting
    std::atomic<uint64_t> patience_us;  // marked; until when it asks the others to wait, CLOCK_MONOTONIC
    std::atomic<uint64_t> culprits[8];  // behind kFailed: a bit for each, of the first ranks there are
    std::atomic<uint64_t> board;        // the id of its process's board (board.hpp); 0: it has none
    std::atomic<int32_t> board_fd;
};
static_assert(sizeof(RankControl) == 128);

struct alignas(128) SegmentHeader {
    uint64_t magic;
    uint64_t bytes;
    int32_t world;
    uint32_t slot_bytes;
    uint32_t p2p_chunk;
    uint32_t p2p_depth;
    uint64_t id;                                  // random
    alignas(128) std::atomic<uint32_t> sleepers;  // how many ranks sleep: usually 0, so no scan
    std::atomic<uint32_t> failures;               // how many ranks gave up
};

// One direction of one pair: a ring of `p2p_depth` chunks.
struct alignas(128) Channel {
    std::atomic<uint64_t> head;  // marked: chunks written
    char pad[kLine - 8];
    std::atomic<uint64_t> tail;      // marked: chunks read
    std::atomic<uint64_t> rejected;  // marked: 1 + number of the message that the receiver refused
};
struct ChunkHeader {
    uint64_t message;  // number of the message in this channel, from 0
    uint64_t total;    // bytes of the whole message
    uint64_t count;
    uint32_t dtype;
    uint32_t bytes;          // of this chunk
    uint64_t at, heap_size;  // of an Offer; heap_size > 0: the whole message is there
    int32_t heap_fd;
    uint32_t unused;
    uint64_t check;  // of all this and the chunk's number; the writer counts it in `head` last
    uint64_t checked(uint64_t number) const {
        return check_of(check_of(number, message, total, count),
                        check_of(at, heap_size, uint32_t(heap_fd), 0), uint64_t(dtype) << 32 | bytes, 1) |
               1;
    }
};
static_assert(sizeof(ChunkHeader) == kLine);

struct Layout {
    int world;
    uint32_t slot_bytes, p2p_chunk, p2p_depth;
    uint64_t controls, announcements, slots, channels, chunks, bytes;
    static Layout plan(int world, uint32_t slot_bytes, uint32_t p2p_bytes);
    uint64_t end_of_chunks() const;
};

class Segment {
  public:
    // Creates the memfd; `fd()` is what the others open.
    Segment(int world, uint32_t slot_bytes, uint32_t p2p_bytes);
    // Maps what process `pid` holds as `fd`.
    Segment(int pid, int fd);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    void close_fd();  // once all ranks have mapped it
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
        uint64_t pair = uint64_t(from) * (layout_.world - 1) + to - (to > from);  // nobody sends to oneself
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
