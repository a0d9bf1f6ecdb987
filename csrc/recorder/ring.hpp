// The flight recorder's ring: one memory-mapped file per process with records of a fixed size. The file holds
// everything that a reader needs, so another process can read it while this one runs, hangs, is stopped or is
// dead. unicomm/flight_recorder/ring/reader.py has the same layout as numpy types; a test compares sizes and
// offsets.
//
// File: Header | meta (JSON) | Comm[comm_cap] | Frame[frame_cap] | string heap | Record[rec_cap]
// All integers are little endian. Times are CLOCK_MONOTONIC nanoseconds; the header pairs that clock with
// CLOCK_REALTIME.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace unicomm {

namespace ring {

constexpr char kMagic[8] = {'U', 'C', 'R', 'I', 'N', 'G', '0', '1'};
constexpr uint32_t kVersion = 3;
constexpr int kMaxDims = 4;  // dimensions of the first input and output that a record keeps

constexpr uint32_t kOtherError = 100;  // `Record::error` of an error that is no FaultCode
// A timeout as records hold it: milliseconds, at most about 50 days.
constexpr uint32_t timeout_ms(double seconds) {
    return seconds * 1000 < UINT32_MAX ? static_cast<uint32_t>(seconds * 1000) : UINT32_MAX;
}

enum HeaderFlags : uint32_t { kCleanClose = 1 };

struct alignas(64) Header {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint32_t pid;
    int32_t rank;  // in the world; -1 if the process is no rank of a launched job
    int32_t world;
    std::atomic<uint32_t> flags;
    uint64_t proc_start_ticks;  // field 22 of /proc/PID/stat: shows whether PID is still the same process
    uint64_t start_mono_ns, start_real_ns;
    uint64_t last_mono_ns, last_real_ns;  // updated when a communicator is created and at close
    uint64_t file_bytes;
    uint64_t meta_off, meta_len;
    uint64_t comm_off;
    uint32_t comm_cap, comm_size;
    std::atomic<uint32_t> comm_count;
    uint32_t frame_cap;
    uint64_t frame_off;
    uint32_t frame_size;
    std::atomic<uint32_t> frame_count;
    std::atomic<uint32_t> frames_dropped, strings_dropped;
    uint64_t heap_off, heap_cap;
    std::atomic<uint64_t> heap_used;
    uint64_t rec_off;
    uint32_t rec_cap, rec_size;
    // Records ever begun, and places that were left out for those under way. The ring holds the last rec_cap
    // of these, and older ones that are under way.
    std::atomic<uint64_t> rec_next;
    std::atomic<uint64_t> rec_skipped;  // places that were left out (from version 3 on)
};

struct Text {
    uint32_t off, len;  // in the heap; {0, 0} is the empty text
};

enum CommState : uint32_t { kOpen = 1, kFinalized = 2, kFailed = 3 };

struct alignas(64) Comm {
    Text name, backend, uid, ranks;  // ranks: global ranks, as "0-3,8,10-14:2"
    int32_t rank, size;
    std::atomic<uint32_t> state;
    uint32_t reserved;
    uint64_t created_ns;
    // The highest sequence number in each state. They outlive the records when the ring wraps.
    std::atomic<uint64_t> coll_created, coll_started, coll_completed;
    std::atomic<uint64_t> p2p_created, p2p_completed;
};

enum class Whose : uint32_t { kUser = 0, kWrapper = 1, kTorch = 2 };

// A line of a call path. Paths form a tree: those that begin alike share the frames of their beginning.
struct Frame {
    Text file, function;
    uint32_t line;
    uint32_t caller;  // 1 + index of the frame that called this one, 0: none, or none that is kept
    Whose whose;
    uint32_t reserved;
};
constexpr size_t kMostPathFrames = 16;

enum class State : uint8_t { kCreated = 1, kStarted = 2, kCompleted = 3, kFailed = 4 };
// kCaptured: captured by a graph. Each replay of the graph records its operations again (kReplayed), in a
// row; the first record of the row also has kReplay.
// kInputChecksum, kOutputChecksum: that field of the record is set. kCompared: the ranks have compared the
// checksums of their outputs, which have to be alike. kEncoded: the elements travelled in a wire format, and
// the record has the bytes that were sent. kFromAny: a receive from any rank, whose sender is known now.
enum RecordFlags : uint16_t {
    kAsync = 1,
    kP2P = 2,
    kBatch = 4,
    kReceive = 8,
    kCaptured = 16,
    kReplayed = 32,
    kReplay = 64,
    kInputChecksum = 128,
    kOutputChecksum = 256,
    kCompared = 512,
    kEncoded = 1024,
    kFromAny = 2048
};

struct alignas(64) Record {
    std::atomic<uint64_t> id;  // from 1; 0 while the record is being written
    uint64_t seq;              // collectives: in the communicator, from 1; messages: in the pair
    uint64_t op_id;            // process-wide
    uint64_t input_checksum;   // of checksum/data_checksum.hpp, if the flag is set; else meaningless
    uint64_t created_ns, started_ns, completed_ns;  // 0: not yet
    uint16_t comm, op;
    std::atomic<uint8_t> state;
    uint8_t red, in_dtype, out_dtype;
    int32_t peer;    // root of a collective, or peer of a message (ranks of the group); else -1
    uint32_t frame;  // 1 + index of the innermost frame of the call path, 0: unknown
    uint32_t tid;
    uint32_t timeout_ms;
    uint64_t in_numel, out_numel;  // all tensors together
    uint16_t n_in, n_out;
    uint8_t in_ndim, out_ndim;  // of the first tensor; may exceed kMaxDims
    uint16_t flags;
    uint64_t batch;  // shared by the operations of a batch; 0: none
    int64_t in_dims[kMaxDims], out_dims[kMaxDims];
    uint32_t error;  // FaultCode, or kOtherError
    // What this rank has sent to others, with the flag kEncoded: bytes, or from kInKib on KiB, rounded up.
    uint32_t sent;
    uint64_t output_checksum;  // as input_checksum
};
static_assert(sizeof(Record) == 192);

constexpr uint32_t kInKib = 1u << 31;
constexpr uint32_t sent_of(uint64_t bytes) {
    if (bytes < kInKib) return static_cast<uint32_t>(bytes);
    uint64_t kib = (bytes + 1023) / 1024;
    return kInKib | static_cast<uint32_t>(kib < kInKib ? kib : kInKib - 1);
}

struct NewRecord {
    uint64_t seq = 0, op_id = 0, batch = 0;
    uint16_t comm = 0, op = 0, flags = 0;
    uint8_t red = 0;
    int32_t peer = -1;
    uint32_t frame = 0, timeout_ms = 0;
    uint8_t in_dtype = 0, out_dtype = 0;
    uint64_t in_numel = 0, out_numel = 0;
    uint16_t n_in = 0, n_out = 0;
    uint8_t in_ndim = 0, out_ndim = 0;
    int64_t in_dims[kMaxDims] = {0, 0, 0, 0}, out_dims[kMaxDims] = {0, 0, 0, 0};
    bool start_now = false;
    uint64_t created_ns = 0;  // 0: now
};

// A frame to be written, and its texts.
struct PathFrame {
    std::string_view file, function;
    uint32_t line = 0;
    Whose whose = Whose::kUser;
};

// An operation that has not completed, and its call site.
struct Pending {
    uint64_t seq = 0;
    std::string file;
    uint32_t line = 0;
};

// The writer of a ring. Any thread may call any method. begin, start and finish take no lock.
class Writer {
  public:
    // Creates `path` (mode 0600); the file must not exist. If `path` is empty the ring is in anonymous
    // memory.
    Writer(const std::string& path, const std::string& meta_json, int rank, int world, uint32_t records);
    ~Writer();
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;

    // Returns the index of the communicator. If the table is full of open ones, that is the last slot, which
    // has no name, no members and rank -1.
    uint16_t add_comm(std::string_view name, std::string_view backend, std::string_view uid,
                      std::string_view ranks, int rank, int size);
    // No effect if the slot belongs to another communicator than `uid` by now.
    void set_comm_state(uint16_t comm, CommState state, std::string_view uid);
    // Writes a call path, the innermost frame first; frames that are there already are not written again.
    // Returns what `Record::frame` holds for it. If the table of frames is full, only the user's frame is
    // kept, and if there is no room for that either, the path is unknown (0).
    uint32_t add_path(const std::vector<PathFrame>& path);

    uint64_t begin(const NewRecord& r);  // returns the record's id
    void add_flags(uint64_t id, uint16_t flags);
    // Of a receive from any rank, when its sender is known, and the number that the pair of ranks has then.
    void set_sender(uint64_t id, int32_t peer, uint64_t seq);
    // Sets the checksum that `which` names, kInputChecksum or kOutputChecksum, and then the flag.
    void add_checksum(uint64_t id, RecordFlags which, uint64_t checksum);
    // Sets the bytes that were sent of encoded elements, and then the flag kEncoded.
    void add_sent(uint64_t id, uint64_t bytes);
    // Reads what a record was begun with; false if it was overwritten.
    bool shape(uint64_t id, NewRecord& found);
    // No effect if the record was overwritten. `ago_ns`: how long ago it happened, as measured by events of
    // the device.
    void start(uint64_t id, uint64_t ago_ns = 0);
    void finish(uint64_t id, State state, uint32_t error, uint64_t ago_ns = 0);

    // Returns the user's line of a record as "file:line"; empty if it is unknown, or the record overwritten.
    std::string place(uint64_t id);

    // Finds the latest operation of a communicator that has started and not completed. Searches all records:
    // not for the fast path.
    bool pending(uint16_t comm, Pending& found) const;

    const std::string& path() const { return path_; }
    std::pair<const char*, uint64_t> memory() const { return {base_, bytes_}; }
    const Header& header() const { return *head_; }
    // The number of records ever begun.
    uint64_t total() const { return head_->rec_next.load() - head_->rec_skipped.load(); }
    // Marks the ring as closed cleanly; with `remove`, also removes the file.
    void close(bool remove);
    // For a forked child: the mapping is the file of the parent and must not be written.
    void detach_after_fork();

  private:
    Text intern(std::string_view text);
    Text append(std::string_view text);
    // Makes `text`, which nothing else refers to, the text `by`: in place if it is as long.
    void replace(Text& text, std::string_view by);
    uint16_t add_unlisted();
    Record& next_place(uint64_t& id);
    uint32_t add_frame(const PathFrame& frame, uint32_t caller, uint32_t capacity);
    const Frame* user_frame(uint32_t innermost) const;
    std::string file_of(const Frame& frame) const;
    Record* find(uint64_t id);
    void renew_clock();

    std::string path_;
    uint64_t bytes_ = 0;
    uint64_t mask_ = 0;  // the capacity is a power of two
    std::atomic<uint64_t> skipped_in_lap_{0};
    std::deque<uint16_t> closed_;  // slots of closed communicators, those closed longest ago first
    std::unordered_map<std::string, Text> interned_;
    using FrameKey = std::array<uint32_t, 5>;  // file, function, line, caller, whose
    std::map<FrameKey, uint32_t> known_frames_;
    char* base_ = nullptr;
    Header* head_ = nullptr;
    Comm* comms_ = nullptr;
    Frame* frames_ = nullptr;
    char* heap_ = nullptr;
    Record* recs_ = nullptr;
    std::atomic<bool> writable_{false};
};

}  // namespace ring
}  // namespace unicomm
