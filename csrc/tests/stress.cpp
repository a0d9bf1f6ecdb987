// The native core under a sanitizer. Ranks, as threads over one mapping, run random valid operations and
// check every result; then one rank aborts, and the others must end with the right fault. Run by `make
// sanitize`.
#include <fcntl.h>
#include <sys/mman.h>

#include <chrono>

#include "shm/waiting/wait_table.hpp"
#include "tests/random_operations.hpp"

using namespace unicomm;
using namespace unicomm::testing;
using shm::PeerHeap;

namespace {

// A heap that another process offers must be checked before it is mapped.
void refuses(const char* what, int fd, uint64_t size) {
    try {
        PeerHeap heap(static_cast<int>(getpid()), fd, size);
    } catch (const SystemFailure&) {
        return;
    }
    expect(false, what);
}

void foreign_heaps() {
    Heap& mine = Heap::mine();
    PeerHeap same(static_cast<int>(getpid()), mine.fd(), mine.size());
    auto* data = static_cast<char*>(mine.allocate(10000));
    data[9999] = 7;
    expect(same.base()[mine.offset(data) + 9999] == 7, "a second mapping");
    Heap::release(data);
    refuses("another size", mine.fd(), mine.size() - 4096);
    refuses("no descriptor", 1 << 20, mine.size());
    int unsealed = memfd_create("unicomm-tensors", MFD_CLOEXEC);
    expect(ftruncate(unsealed, 8192) == 0, "ftruncate");
    refuses("a file that may shrink", unsealed, 8192);
    close(unsealed);
    refuses("a device", open("/dev/zero", O_RDONLY | O_CLOEXEC), 8192);
}

void heap_is_reused() {
    Heap& heap = Heap::mine();
    uint64_t before = heap.allocated();
    std::mt19937 rng(7);
    std::vector<std::pair<char*, size_t>> held;
    for (int i = 0; i < 3000; ++i) {
        if (held.size() > 40 || (!held.empty() && rng() % 2)) {
            std::swap(held[rng() % held.size()], held.back());
            auto [p, n] = held.back();
            for (size_t k = 0; k < n; k += 61) expect(p[k] == static_cast<char>(n), "blocks do not overlap");
            Heap::release(p);
            held.pop_back();
        } else {
            size_t n = rng() % 3 ? rng() % 300 : rng() % 200000;
            auto* p = static_cast<char*>(heap.allocate(n));
            expect(reinterpret_cast<uintptr_t>(p) % 64 == 0, "alignment");
            std::memset(p, static_cast<char>(n), n);
            held.push_back({p, n});
        }
    }
    for (auto [p, n] : held) Heap::release(p);
    expect(heap.allocated() == before, "all of it came back");
}

// Ranks that wait for each other through two communicators, and ranks that are only late.
void cycles() {
    // Like the check of the interpreter: no promise before both threads wait.
    shm::set_thread_check(
        [](uint64_t, int, const std::vector<uint64_t>& waiting, std::vector<uint64_t>& matter) {
            matter = waiting;
            return waiting.size() == 2;
        });
    std::vector<int> pids(2, static_cast<int>(getpid()));
    for (int turn = 0; turn < 4; ++turn) {
        std::unique_ptr<Group> groups[2][2];
        for (auto& pair : groups) {
            auto segment = std::make_shared<Segment>(2, 4096, 4096);
            for (int r = 0; r < 2; ++r) pair[r] = std::make_unique<Group>(segment, r, pids, "circle");
        }
        std::vector<std::thread> threads;
        for (int r = 0; r < 2; ++r) {
            threads.emplace_back([&, r] {
                Fault f =
                    groups[r][r]->barrier(op_of(OpCode::kBarrier, 0));  // rank 0 in one, rank 1 in the other
                bool told = f.code == FaultCode::kDeadlock || f.code == FaultCode::kPeerLost;
                expect(told, "a circle: fault " + std::to_string(int(f.code)));
                groups[r][r]->abort(), groups[1 - r][r]->abort();
            });
        }
        for (auto& t : threads) t.join();
    }
    shm::set_thread_check(nullptr);
    on_ranks(4, [&](Group& g) {  // without promises about the other threads there is no deadlock
        if (g.rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(700));
        Fault f = g.barrier(op_of(OpCode::kBarrier, 0));
        expect(!f, "late is no deadlock");
    });
}

}  // namespace

int main(int argc, char** argv) {
    int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
    foreign_heaps();
    heap_is_reused();
    for (int world : {2, 3, 5}) {
        on_ranks(world, [&](Group& g) {
            std::mt19937 rng(42);
            for (int i = 0; i < rounds; ++i) {
                Fault f = one_operation(g, rng);
                expect(!f, "operation " + std::to_string(i) + ": " + f.detail);
            }
            g.finalize();
        });
        on_ranks(world, [&](Group& g) {
            if (g.rank() == 0) return g.abort();
            Fault f = g.barrier(op_of(OpCode::kBarrier, 0));
            expect(f.code == FaultCode::kAborted && f.culprits == std::vector<int>{0}, "abort");
            expect(g.barrier(op_of(OpCode::kBarrier, 0)).code == FaultCode::kAborted, "abort stays");
        });
        on_ranks(world, [&](Group& g) {
            if (g.rank() == 0) return g.finalize();
            Fault f = g.barrier(op_of(OpCode::kBarrier, 0));
            expect(f.code == FaultCode::kPeerLost && f.culprits == std::vector<int>{0}, "finalized peer");
        });
    }
    cycles();
    // No wrap-around: a writer that lags a whole lap may tear a record, which readers cannot always notice.
    ring::Writer writer("", "{}", 0, 1, 4096);
    const std::vector<ring::PathFrame> known{{"w.py", "wrapper", 1, ring::Whose::kWrapper},
                                             {"/job/0.py", "step", 1, ring::Whose::kUser},
                                             {"/job/main.py", "1", 1, ring::Whose::kUser}};
    uint32_t known_path = writer.add_path(known);  // before the threads have filled the table of frames
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&writer, t] {
            uint16_t comm = writer.add_comm("c" + std::to_string(t), "shm", "u", "0", 0, 1);
            for (uint64_t i = 1; i <= 1000; ++i) {
                ring::NewRecord record;
                record.comm = comm;
                record.seq = i;
                record.start_now = true;
                // 4000 paths that share their callers: more frames than the table holds.
                std::string file = "/job/" + std::to_string(t) + ".py", outer = std::to_string(i % 7);
                auto line = static_cast<uint32_t>(i);
                record.frame = writer.add_path({{"w.py", "wrapper", line, ring::Whose::kWrapper},
                                                {file, "step", line, ring::Whose::kUser},
                                                {"/job/main.py", outer, 1, ring::Whose::kUser}});
                writer.finish(writer.begin(record), ring::State::kCompleted, 0);
            }
        });
    }
    for (auto& t : threads) t.join();
    expect(writer.header().rec_next.load() == 4000, "records");
    expect(writer.header().frame_count.load() == writer.header().frame_cap, "frames of call paths");
    ring::Pending pending;
    expect(!writer.pending(0, pending), "no operation is pending");
    // A call path that is known already; the user's line is not the innermost one.
    ring::NewRecord record;
    record.start_now = true;
    record.frame = writer.add_path(known);
    expect(record.frame == known_path, "a known call path is not written again");
    writer.begin(record);
    expect(writer.pending(0, pending) && pending.file == "/job/0.py" && pending.line == 1, "the user's line");
    std::puts("native core: all operations right");
    return 0;
}
