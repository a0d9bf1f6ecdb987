// The writer of the ring.
#include "recorder/ring.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/fork.hpp"

namespace unicomm::ring {
namespace {

constexpr uint32_t kComms = 256;
constexpr uint16_t kUnlisted = kComms - 1;  // for communicators that the table has no room for
constexpr int kMostKept = 128;              // unfinished records in a row that are not overwritten
constexpr uint32_t kFrames = 4096;
constexpr uint32_t kLoneFrames = 512;  // the last ones, for frames without their callers
constexpr uint64_t kHeap = 192 * 1024;

std::mutex table_mutex;  // guards communicators, frames and strings; records take no lock
[[maybe_unused]] const bool registered = (keep_over_fork<table_mutex>(), true);

uint64_t align64(uint64_t n) { return (n + 63) & ~uint64_t{63}; }

// A thread that forks has another number in the child.
thread_local uint32_t known_thread = 0;
[[maybe_unused]] const bool forgets = (pthread_atfork(nullptr, nullptr, [] { known_thread = 0; }), true);

uint32_t thread_id() {
    if (known_thread == 0) known_thread = static_cast<uint32_t>(syscall(SYS_gettid));
    return known_thread;
}

bool is_under_way(const Record& r) {
    if (r.id.load(std::memory_order_relaxed) == 0) return false;
    uint8_t state = r.state.load(std::memory_order_relaxed);
    return state == static_cast<uint8_t>(State::kCreated) || state == static_cast<uint8_t>(State::kStarted);
}

uint64_t process_start_ticks() {
    FILE* f = std::fopen("/proc/self/stat", "r");
    if (!f) return 0;
    char buf[1024];
    size_t n = std::fread(buf, 1, sizeof buf - 1, f);
    std::fclose(f);
    buf[n] = 0;
    const char* p = std::strrchr(buf, ')');  // the command's name may contain blanks and parentheses
    if (!p) return 0;
    unsigned long long ticks = 0;
    std::sscanf(p + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                &ticks);
    return ticks;
}

void raise_to(std::atomic<uint64_t>& high, uint64_t value) {
    uint64_t old = high.load(std::memory_order_relaxed);
    while (old < value && !high.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
    }
}

}  // namespace

Writer::Writer(const std::string& path, const std::string& meta, int rank, int world, uint32_t records)
    : path_(path) {
    records = std::bit_ceil(std::max<uint32_t>(records, 16));
    mask_ = records - 1;
    uint64_t meta_off = align64(sizeof(Header));
    uint64_t comm_off = align64(meta_off + meta.size());
    uint64_t frame_off = align64(comm_off + kComms * sizeof(Comm));
    uint64_t heap_off = align64(frame_off + kFrames * sizeof(Frame));
    uint64_t rec_off = align64(heap_off + kHeap);
    bytes_ = rec_off + uint64_t{records} * sizeof(Record);

    int fd = -1;
    if (!path.empty()) {
        fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0) throw_errno("cannot create the recorder's ring " + path);
        // posix_fallocate, not ftruncate: with a full tmpfs it fails here, instead of a SIGBUS later.
        if (int code = posix_fallocate(fd, 0, static_cast<off_t>(bytes_)); code != 0) {
            ::close(fd);
            ::unlink(path.c_str());
            errno = code;
            throw_errno("no room for the recorder's ring " + path);
        }
    }
    int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void* mem = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0) ::close(fd);
    if (mem == MAP_FAILED) {
        int code = errno;
        if (fd >= 0) ::unlink(path.c_str());
        errno = code;
        throw_errno("cannot map the recorder's ring");
    }
    base_ = static_cast<char*>(mem);
    head_ = reinterpret_cast<Header*>(base_);
    comms_ = reinterpret_cast<Comm*>(base_ + comm_off);
    frames_ = reinterpret_cast<Frame*>(base_ + frame_off);
    heap_ = base_ + heap_off;
    recs_ = reinterpret_cast<Record*>(base_ + rec_off);

    Header& h = *head_;
    h.version = kVersion;
    h.header_bytes = sizeof(Header);
    h.pid = static_cast<uint32_t>(getpid());
    h.rank = rank;
    h.world = world;
    h.proc_start_ticks = process_start_ticks();
    h.start_mono_ns = clock_ns(CLOCK_MONOTONIC);
    h.start_real_ns = clock_ns(CLOCK_REALTIME);
    renew_clock();
    h.file_bytes = bytes_;
    h.meta_off = meta_off;
    h.meta_len = meta.size();
    std::memcpy(base_ + meta_off, meta.data(), meta.size());
    h.comm_off = comm_off;
    h.comm_cap = kComms;
    h.comm_size = sizeof(Comm);
    h.frame_off = frame_off;
    h.frame_cap = kFrames;
    h.frame_size = sizeof(Frame);
    h.heap_off = heap_off;
    h.heap_cap = kHeap;
    h.heap_used.store(1);  // offset 0 is the empty text
    h.rec_off = rec_off;
    h.rec_cap = records;
    h.rec_size = sizeof(Record);
    // The magic is written last: a reader that sees it sees a complete header.
    std::atomic_thread_fence(std::memory_order_release);
    std::memcpy(h.magic, kMagic, sizeof kMagic);
    writable_ = true;
}

Writer::~Writer() {
    writable_ = false;
    if (base_) munmap(base_, bytes_);
}

void Writer::renew_clock() {
    head_->last_mono_ns = clock_ns(CLOCK_MONOTONIC);
    head_->last_real_ns = clock_ns(CLOCK_REALTIME);
}

Text Writer::intern(std::string_view text) {
    if (text.empty()) return {0, 0};
    auto known = interned_.find(std::string(text));
    if (known != interned_.end()) return known->second;
    Text result = append(text);
    if (result.len) interned_.emplace(text, result);
    return result;
}

Text Writer::append(std::string_view text) {
    uint64_t used = head_->heap_used.load();
    if (used + text.size() > kHeap) {
        head_->strings_dropped.fetch_add(1);
        return {0, 0};
    }
    std::memcpy(heap_ + used, text.data(), text.size());
    head_->heap_used.store(used + text.size(), std::memory_order_release);
    return {static_cast<uint32_t>(used), static_cast<uint32_t>(text.size())};
}

void Writer::replace(Text& text, std::string_view by) {
    Text old = text;  // one read: other processes can write to the file
    if (old.len && old.len == by.size() && old.off <= kHeap && old.len <= kHeap - old.off) {
        std::memcpy(heap_ + old.off, by.data(), by.size());
    } else {
        text = append(by);
    }
}

uint16_t Writer::add_comm(std::string_view name, std::string_view backend, std::string_view uid,
                          std::string_view ranks, int rank, int size) {
    if (!writable_) return 0;
    std::lock_guard lock(table_mutex);
    uint32_t index = head_->comm_count.load();
    // A job that keeps creating communicators reuses the slots of closed ones. Readers tell the records of
    // the former one by their times.
    if (index >= kUnlisted) {
        if (closed_.empty()) return add_unlisted();
        index = closed_.front();
        closed_.pop_front();
    }
    Comm& c = comms_[index];
    c.name = intern(name);
    c.backend = intern(backend);
    replace(c.uid, uid);  // no other communicator has it: kept for each, these would fill the heap
    c.ranks = intern(ranks);
    c.rank = rank;
    c.size = size;
    c.created_ns = now_ns();
    c.coll_created = c.coll_started = c.coll_completed = c.p2p_created = c.p2p_completed = 0;
    c.state.store(kOpen, std::memory_order_release);
    if (index == head_->comm_count.load()) head_->comm_count.store(index + 1, std::memory_order_release);
    renew_clock();
    return static_cast<uint16_t>(index);
}

uint16_t Writer::add_unlisted() {
    Comm& c = comms_[kUnlisted];
    if (head_->comm_count.load() == kUnlisted) {
        c.rank = -1;
        c.created_ns = now_ns();
        c.state.store(kOpen, std::memory_order_release);
        head_->comm_count.store(kComms, std::memory_order_release);
    }
    return kUnlisted;
}

void Writer::set_comm_state(uint16_t comm, CommState state, std::string_view uid) {
    if (!writable_ || comm >= kUnlisted) return;
    std::lock_guard lock(table_mutex);
    Comm& c = comms_[comm];
    Text of = c.uid;  // one read: other processes can write to the file
    bool known = of.off <= kHeap && of.len <= kHeap - of.off;
    // The slot of a communicator that broke may belong to another one by the time it is finalized.
    if (!known || (of.len && std::string_view(heap_ + of.off, of.len) != uid)) return;
    if (c.state.exchange(state) == kOpen) closed_.push_back(comm);
}

uint32_t Writer::add_path(const std::vector<PathFrame>& path) {
    if (!writable_ || path.empty()) return 0;
    std::lock_guard lock(table_mutex);
    uint32_t id = 0;
    for (auto frame = path.rbegin(); frame != path.rend(); ++frame) {
        id = add_frame(*frame, id, kFrames - kLoneFrames);
        if (id) continue;
        head_->frames_dropped.fetch_add(1);
        auto user = std::find_if(path.begin(), path.end(), [](auto& f) { return f.whose == Whose::kUser; });
        return add_frame(user == path.end() ? path.front() : *user, 0, kFrames);
    }
    return id;
}

uint32_t Writer::add_frame(const PathFrame& frame, uint32_t caller, uint32_t capacity) {
    Text file = intern(frame.file), function = intern(frame.function);
    FrameKey key{file.off, function.off, frame.line, caller, static_cast<uint32_t>(frame.whose)};
    if (auto known = known_frames_.find(key); known != known_frames_.end()) return known->second;
    uint32_t index = head_->frame_count.load();
    if (index >= capacity) return 0;
    Frame& f = frames_[index];
    f.file = file;
    f.function = function;
    f.line = frame.line;
    f.caller = caller;
    f.whose = frame.whose;
    head_->frame_count.store(index + 1, std::memory_order_release);
    known_frames_.emplace(key, index + 1);
    return index + 1;
}

const Frame* Writer::user_frame(uint32_t innermost) const {
    uint32_t count = std::min(head_->frame_count.load(std::memory_order_acquire), kFrames);
    if (innermost == 0 || innermost > count) return nullptr;
    uint32_t id = innermost;
    for (size_t i = 0; i < kMostPathFrames && id > 0 && id <= count; ++i) {
        const Frame& f = frames_[id - 1];
        if (f.whose == Whose::kUser) return &f;
        id = f.caller;
    }
    return &frames_[innermost - 1];
}

std::string Writer::file_of(const Frame& frame) const {
    Text file = frame.file;  // one read: other processes can write to the file
    return file.off <= kHeap && file.len <= kHeap - file.off ? std::string(heap_ + file.off, file.len) : "";
}

// The operation that hangs is the one that readers look for, however many others came after it. So a record
// is not overwritten while its operation is under way: its place is left out, as long as half of the ring is
// there for others.
Record& Writer::next_place(uint64_t& id) {
    for (int kept = 0;; ++kept) {
        id = head_->rec_next.fetch_add(1, std::memory_order_relaxed) + 1;
        uint64_t place = (id - 1) & mask_;
        if (place == 0) skipped_in_lap_.store(0, std::memory_order_relaxed);
        Record& r = recs_[place];
        if (!is_under_way(r) || kept == kMostKept) return r;
        if (skipped_in_lap_.fetch_add(1, std::memory_order_relaxed) > mask_ / 2) return r;
        head_->rec_skipped.fetch_add(1, std::memory_order_relaxed);
    }
}

uint64_t Writer::begin(const NewRecord& n) {
    if (!writable_.load(std::memory_order_relaxed)) return 0;
    uint64_t id = 0;
    Record& r = next_place(id);
    r.id.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    uint64_t now = n.created_ns ? n.created_ns : now_ns();
    r.seq = n.seq;
    r.op_id = n.op_id;
    r.created_ns = now;
    r.started_ns = n.start_now ? now : 0;
    r.completed_ns = 0;
    r.comm = n.comm;
    r.op = n.op;
    r.state.store(static_cast<uint8_t>(n.start_now ? State::kStarted : State::kCreated),
                  std::memory_order_relaxed);
    r.red = n.red;
    r.in_dtype = n.in_dtype;
    r.out_dtype = n.out_dtype;
    r.peer = n.peer;
    r.frame = n.frame;
    r.tid = thread_id();
    r.timeout_ms = n.timeout_ms;
    r.in_numel = n.in_numel;
    r.out_numel = n.out_numel;
    r.n_in = n.n_in;
    r.n_out = n.n_out;
    r.in_ndim = n.in_ndim;
    r.out_ndim = n.out_ndim;
    r.flags = n.flags;
    r.batch = n.batch;
    std::memcpy(r.in_dims, n.in_dims, sizeof r.in_dims);
    std::memcpy(r.out_dims, n.out_dims, sizeof r.out_dims);
    r.error = 0;
    r.id.store(id, std::memory_order_release);
    Comm& c = comms_[n.comm];
    if (n.flags & kP2P) {
        c.p2p_created.fetch_add(1, std::memory_order_relaxed);
    } else {
        raise_to(c.coll_created, n.seq);
        if (n.start_now) raise_to(c.coll_started, n.seq);
    }
    return id;
}

void Writer::add_flags(uint64_t id, uint16_t flags) {
    if (Record* r = find(id)) r->flags |= flags;
}

void Writer::set_sender(uint64_t id, int32_t peer, uint64_t seq) {
    Record* r = find(id);
    if (!r) return;
    r->seq = seq;
    r->peer = peer;
    r->flags |= kFromAny;
}

void Writer::add_checksum(uint64_t id, RecordFlags which, uint64_t checksum) {
    Record* r = find(id);
    if (!r) return;
    (which == kInputChecksum ? r->input_checksum : r->output_checksum) = checksum;
    std::atomic_thread_fence(std::memory_order_release);  // a reader that sees the flag sees the checksum
    r->flags |= which;
}

void Writer::add_sent(uint64_t id, uint64_t bytes) {
    Record* r = find(id);
    if (!r) return;
    r->sent = sent_of(bytes);
    std::atomic_thread_fence(std::memory_order_release);  // as in add_checksum
    r->flags |= kEncoded;
}

std::string Writer::place(uint64_t id) {
    const Record* r = find(id);
    const Frame* frame = r ? user_frame(r->frame) : nullptr;
    return frame ? file_of(*frame) + ":" + std::to_string(frame->line) : "";
}

bool Writer::shape(uint64_t id, NewRecord& n) {
    Record* r = find(id);
    if (r == nullptr) return false;
    n.seq = r->seq;
    n.op_id = r->op_id;
    n.batch = r->batch;
    n.comm = r->comm;
    n.op = r->op;
    n.flags = r->flags;
    n.red = r->red;
    n.peer = r->peer;
    n.frame = r->frame;
    n.timeout_ms = r->timeout_ms;
    n.in_dtype = r->in_dtype;
    n.out_dtype = r->out_dtype;
    n.in_numel = r->in_numel;
    n.out_numel = r->out_numel;
    n.n_in = r->n_in;
    n.n_out = r->n_out;
    n.in_ndim = r->in_ndim;
    n.out_ndim = r->out_ndim;
    std::memcpy(n.in_dims, r->in_dims, sizeof n.in_dims);
    std::memcpy(n.out_dims, r->out_dims, sizeof n.out_dims);
    return true;
}

Record* Writer::find(uint64_t id) {
    if (id == 0 || !writable_.load(std::memory_order_relaxed)) return nullptr;
    Record& r = recs_[(id - 1) & mask_];
    return r.id.load(std::memory_order_relaxed) == id ? &r : nullptr;
}

void Writer::start(uint64_t id, uint64_t ago_ns) {
    Record* r = find(id);
    if (!r) return;
    r->started_ns = now_ns() - ago_ns;
    r->state.store(static_cast<uint8_t>(State::kStarted), std::memory_order_release);
    if (!(r->flags & kP2P)) raise_to(comms_[r->comm].coll_started, r->seq);
}

void Writer::finish(uint64_t id, State state, uint32_t error, uint64_t ago_ns) {
    Record* r = find(id);
    if (!r) return;
    Comm& c = comms_[r->comm];
    bool p2p = r->flags & kP2P;
    uint64_t seq = r->seq;
    r->completed_ns = now_ns() - ago_ns;
    r->error = error;
    // From here on the record may be overwritten.
    r->state.store(static_cast<uint8_t>(state), std::memory_order_release);
    if (state != State::kCompleted) return;
    if (p2p) {
        c.p2p_completed.fetch_add(1, std::memory_order_relaxed);
    } else {
        raise_to(c.coll_completed, seq);
    }
}

bool Writer::pending(uint16_t comm, Pending& found) const {
    uint64_t newest = 0;
    for (uint64_t at = 0; at <= mask_; ++at) {
        const Record& r = recs_[at];
        uint64_t id = r.id.load(std::memory_order_acquire);
        if (id <= newest || r.comm != comm) continue;
        if (r.state.load(std::memory_order_acquire) != static_cast<uint8_t>(State::kStarted)) continue;
        newest = id;
        found = {r.seq, "", 0};
        if (const Frame* f = user_frame(r.frame)) {
            found.file = file_of(*f);
            found.line = f->line;
        }
    }
    return newest > 0;
}

void Writer::close(bool remove) {
    if (!writable_.exchange(false)) return;
    renew_clock();
    head_->flags.fetch_or(kCleanClose);
    if (remove && !path_.empty()) ::unlink(path_.c_str());
}

void Writer::detach_after_fork() { writable_ = false; }

}  // namespace unicomm::ring
