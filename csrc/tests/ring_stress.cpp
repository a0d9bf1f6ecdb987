// The recorder's ring under a sanitizer: threads write records until the ring wraps many times, while readers
// look at the file through a mapping of their own, as other processes do. Records carry data checksums. Run
// by `make sanitize`.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "checksum/data_checksum.hpp"
#include "tests/random_operations.hpp"

using namespace unicomm;
using namespace unicomm::testing;
using namespace unicomm::ring;

namespace {

// A file as another process maps it.
class View {
  public:
    explicit View(const std::string& path) {
        int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat info{};
        expect(fd >= 0 && fstat(fd, &info) == 0, "the ring can be opened");
        bytes_ = size_t(info.st_size);
        void* mem = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        expect(mem != MAP_FAILED, "the ring can be mapped");
        base_ = static_cast<const char*>(mem);
    }
    ~View() { munmap(const_cast<char*>(base_), bytes_); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    const Header& header() const { return *reinterpret_cast<const Header*>(base_); }
    const Record& record(uint64_t i) const {
        return reinterpret_cast<const Record*>(base_ + header().rec_off)[i];
    }
    const Comm& comm(uint64_t i) const { return reinterpret_cast<const Comm*>(base_ + header().comm_off)[i]; }
    const Frame& frame(uint64_t i) const {
        return reinterpret_cast<const Frame*>(base_ + header().frame_off)[i];
    }
    std::string text(Text at) const {
        expect(at.off <= header().heap_cap && at.len <= header().heap_cap - at.off, "texts are in the heap");
        return {base_ + header().heap_off + at.off, at.len};
    }

  private:
    size_t bytes_;
    const char* base_;
};

constexpr int kWriters = 4;

// The checksum of as many bytes as a record's number says: in memory of its own, so that a byte read beside
// it is noticed, and at any alignment. A flipped bit changes the checksum.
uint64_t checksum_of(uint64_t seq, bool checked) {
    size_t bytes = size_t(seq % 700), shift = size_t(seq % 9);
    std::vector<char> memory(shift + bytes);
    for (size_t i = 0; i < bytes; ++i) memory[shift + i] = char(seq * 31 + i * 7);
    auto sum = [&] {
        DataChecksum made(2);
        made.add(memory.data() + shift, int64_t(bytes));
        made.add(&seq, sizeof seq);
        return made.value();
    };
    uint64_t found = sum();
    if (checked && bytes) {
        char& flipped = memory[shift + size_t(seq * 13) % bytes];
        flipped = char(flipped ^ (1 << (seq % 8)));
        expect(sum() != found, "a flipped bit changes the checksum");
    }
    return found;
}

void write(Writer& writer, int thread, uint64_t records) {
    uint16_t comm = writer.add_comm("c" + std::to_string(thread), "shm", "u" + std::to_string(thread), "0-3",
                                    thread, kWriters);
    std::string file = "/job/" + std::to_string(thread) + ".py";
    for (uint64_t i = 1; i <= records; ++i) {
        NewRecord record;
        record.comm = comm;
        record.seq = i;
        record.in_numel = 3 * i;
        record.out_numel = 5 * i;
        record.peer = thread;
        record.start_now = i % 2;
        record.frame = writer.add_path(
            {{file, "step", uint32_t(i % 97), Whose::kUser}, {"/job/main.py", "main", 1, Whose::kUser}});
        uint64_t id = writer.begin(record);
        if (!record.start_now) writer.start(id);
        writer.add_checksum(id, kInputChecksum, checksum_of(i, true));
        if (i % 3) writer.add_checksum(id, kOutputChecksum, ~i);
        writer.finish(id, i % 10 ? State::kCompleted : State::kFailed, i % 10 ? 0 : 1);
    }
    writer.set_comm_state(comm, kFinalized, "u" + std::to_string(thread));
}

// Reads all records that are whole; returns how many. Checksums come after the id: they are read once all
// writers have ended.
uint64_t read(const View& view, bool ended = false) {
    const Header& head = view.header();
    expect(std::memcmp(head.magic, kMagic, sizeof kMagic) == 0 && head.version == kVersion, "the header");
    uint64_t whole = 0, frames = head.frame_count.load(std::memory_order_acquire);
    for (uint64_t i = 0; i < head.rec_cap; ++i) {
        const Record& there = view.record(i);
        uint64_t before = there.id.load(std::memory_order_acquire);
        if (before == 0) continue;
        uint64_t seq = there.seq, in = there.in_numel, out = there.out_numel;
        uint32_t frame = there.frame;
        int32_t peer = there.peer;
        std::atomic_thread_fence(std::memory_order_acquire);
        // A writer that lags a whole lap may tear a record: two hold one place, which readers cannot notice.
        uint64_t newest = head.rec_next.load(std::memory_order_acquire);
        if (there.id.load(std::memory_order_relaxed) != before || newest - before >= head.rec_cap) continue;
        if (in != 3 * seq || out != 5 * seq) continue;
        ++whole;
        expect(peer >= 0 && peer < kWriters, "the peer");
        expect(frame > 0 && frame <= view.header().frame_count.load(), "the frame is there");
        if (ended) {
            bool output = there.flags & kOutputChecksum;
            expect(there.flags & kInputChecksum && output == (seq % 3 != 0), "the flags of checksums");
            expect(there.input_checksum == checksum_of(seq, false), "the checksum of the inputs");
            expect(!output || there.output_checksum == ~seq, "the checksum of the outputs");
        }
        if (frame > frames) continue;
        const Frame& f = view.frame(frame - 1);
        expect(view.text(f.file) == "/job/" + std::to_string(peer) + ".py", "the frame's file");
        expect(view.text(f.function) == "step" && f.caller > 0, "the frame's function");
    }
    return whole;
}

}  // namespace

int main(int argc, char** argv) {
    uint64_t records = argc > 1 ? uint64_t(std::atoll(argv[1])) : 20000;
    std::string path = "/tmp/unicomm-ring-stress-" + std::to_string(getpid());
    // Writers take no lock: one that lags a whole lap writes into the record of another
    // (docs/design/ring.md), which is a race by design. The thread sanitizer sees a ring that does not wrap.
#ifdef __SANITIZE_THREAD__
    auto capacity = uint32_t(kWriters * records);
#else
    uint32_t capacity = 1024;
#endif
    Writer writer(path, "{}", 0, kWriters, capacity);
    std::atomic<int> left{kWriters};
    std::atomic<uint64_t> looks{0};
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&] {
            View view(path);
            while (left.load() > 0) {
                read(view);
                ++looks;
                std::this_thread::yield();
            }
        });
    }
    for (int t = 0; t < kWriters; ++t) {
        threads.emplace_back([&, t] {
            write(writer, t, records);
            --left;
        });
    }
    for (auto& t : threads) t.join();
    View view(path);
    expect(writer.total() == kWriters * records, "all records");
    expect(read(view, true) > 0 && looks > 0, "readers saw records");
    for (int c = 0; c < kWriters; ++c) {
        expect(view.comm(uint64_t(c)).state.load() == kFinalized, "the state of a communicator");
        expect(view.comm(uint64_t(c)).coll_created.load() == records, "the last number");
    }
    writer.close(true);
    expect(access(path.c_str(), F_OK) != 0, "the file is removed");
    std::puts("ring: all records right");
    return 0;
}
