// The native core under a sanitizer: ranks as threads over one mapping run random legal operations and
// check every result; then a rank aborts and the others must end with the right fault. `make sanitize`.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/opcode.hpp"
#include "recorder/ring.hpp"
#include "shm/group.hpp"
#include "shm/heap.hpp"

using namespace unicomm;
using shm::Group;
using shm::Heap;
using shm::Message;
using shm::Op;
using shm::PeerHeap;
using shm::Piece;
using shm::Segment;

namespace {

constexpr uint64_t kLimit = 60ull * 1000000000;

void expect(bool good, const std::string& what) {
    if (good) return;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::abort();
}

Op op_of(OpCode code, uint64_t count, int root = -1, Red red = Red::kNone) {
    Op op;
    op.code = static_cast<uint32_t>(code);
    op.dtype = DType::kInt32;
    op.red = red;
    op.root = root;
    op.count = count;
    op.deadline_ns = ring::now_ns() + kLimit;
    return op;
}

int value(int rank, size_t i) { return rank * 1000 + static_cast<int>(i % 997); }

// Half of the tensors are in the heap that the ranks share, by turns of each rank's own: some operations have
// all of theirs there, some none, most some.
template <class T>
struct Somewhere {
    using value_type = T;
    Somewhere() = default;
    template <class U>
    Somewhere(const Somewhere<U>&) {}
    T* allocate(size_t n) {
        static thread_local unsigned turn = 0;
        bool shared = turn++ / 8 % 2;
        return static_cast<T*>(shared ? Heap::mine().allocate(n * sizeof(T)) : std::malloc(n * sizeof(T)));
    }
    void deallocate(T* p, size_t n) {
        if (Heap::holds(p, n * sizeof(T))) {
            Heap::release(p);
        } else {
            std::free(p);
        }
    }
    bool operator==(const Somewhere&) const { return true; }
};
using Data = std::vector<int, Somewhere<int>>;

Data filled(int rank, size_t n) {
    Data v(n);
    for (size_t i = 0; i < n; ++i) v[i] = value(rank, i);
    return v;
}

Piece piece(Data& v, size_t from, size_t n) {
    return {reinterpret_cast<char*>(v.data() + from), n * sizeof(int)};
}

int sum_at(int world, size_t i) {
    int s = 0;
    for (int r = 0; r < world; ++r) s += value(r, i);
    return s;
}

void one_operation(Group& g, std::mt19937& rng) {
    const size_t sizes[] = {0, 1, 3, 16, 17, 1000, 20000, 70001, 200003};
    size_t n = sizes[rng() % 9];
    int world = g.world(), me = g.rank(), root = static_cast<int>(rng() % static_cast<unsigned>(world));
    auto w = static_cast<size_t>(world);
    switch (rng() % 8) {
        case 0: {
            auto v = filled(me, n);
            char* p = reinterpret_cast<char*>(v.data());
            expect(!g.all_reduce(op_of(OpCode::kAllReduce, n, -1, Red::kSum), p, p, n), "all_reduce");
            for (size_t i = 0; i < n; ++i) expect(v[i] == sum_at(world, i), "all_reduce data");
            break;
        }
        case 1: {
            auto v = filled(me, n);
            expect(!g.broadcast(op_of(OpCode::kBroadcast, n, root), piece(v, 0, n)), "broadcast");
            for (size_t i = 0; i < n; ++i) expect(v[i] == value(root, i), "broadcast data");
            break;
        }
        case 2: {
            auto in = filled(me, n);
            Data out(n * w);
            std::vector<Piece> outs;
            for (size_t r = 0; r < w; ++r) outs.push_back(piece(out, r * n, n));
            expect(!g.all_gather(op_of(OpCode::kAllGather, n), piece(in, 0, n), outs), "all_gather");
            for (size_t i = 0; i < n * w; ++i) {
                expect(out[i] == value(static_cast<int>(i / n), i % n), "all_gather data");
            }
            break;
        }
        case 3: {
            auto in = filled(me, n * w);
            Data out(n);
            std::vector<Piece> ins;
            for (size_t r = 0; r < w; ++r) ins.push_back(piece(in, r * n, n));
            expect(!g.reduce_scatter(op_of(OpCode::kReduceScatter, n, -1, Red::kSum), ins, piece(out, 0, n)),
                   "reduce_scatter");
            for (size_t i = 0; i < n; ++i) {
                expect(out[i] == sum_at(world, static_cast<size_t>(me) * n + i), "reduce_scatter data");
            }
            break;
        }
        case 4: {
            auto in = filled(me, n * w);
            Data out(n * w);
            std::vector<Piece> ins, outs;
            for (size_t r = 0; r < w; ++r) {
                ins.push_back(piece(in, r * n, n));
                outs.push_back(piece(out, r * n, n));
            }
            expect(!g.all_to_all(op_of(OpCode::kAllToAll, 0), ins, outs, true), "all_to_all");
            for (size_t i = 0; i < n * w; ++i) {
                expect(out[i] == value(static_cast<int>(i / n), static_cast<size_t>(me) * n + i % n),
                       "all_to_all data");
            }
            break;
        }
        case 5:
            expect(!g.barrier(op_of(OpCode::kBarrier, 0)), "barrier");
            break;
        case 6: {  // a ring, with two messages each way in one batch
            auto a = filled(me, n), b = filled(me + 100, n);
            Data ra(n), rb(n);
            int to = (me + 1) % world, from = (me + world - 1) % world;
            std::vector<Message> batch{{true, to, piece(a, 0, n), DType::kInt32, n},
                                       {true, to, piece(b, 0, n), DType::kInt32, n},
                                       {false, from, piece(ra, 0, n), DType::kInt32, n},
                                       {false, from, piece(rb, 0, n), DType::kInt32, n}};
            expect(!g.exchange(batch, ring::now_ns() + kLimit), "exchange");
            for (size_t i = 0; i < n; ++i) {
                expect(ra[i] == value(from, i) && rb[i] == value(from + 100, i), "exchange data");
            }
            break;
        }
        default: {  // a mismatch leaves the group usable
            Op op = op_of(OpCode::kBarrier, 0, me == root ? 1 : -1);
            Fault f = g.barrier(op);
            expect(f.code == FaultCode::kMismatch, "mismatch");
            if (world > 2) expect(f.culprits == std::vector<int>{root}, "minority");
        }
    }
}

void on_ranks(int world, const std::function<void(Group&)>& body) {
    auto segment = std::make_shared<Segment>(world, 64 * 1024, 64 * 1024);
    std::vector<int> pids(static_cast<size_t>(world), static_cast<int>(getpid()));
    std::vector<std::unique_ptr<Group>> groups;
    for (int r = 0; r < world; ++r) groups.push_back(std::make_unique<Group>(segment, r, pids));
    std::vector<std::thread> threads;
    for (auto& g : groups) threads.emplace_back([&] { body(*g); });
    for (auto& t : threads) t.join();
}

// What another process offers as its heap is looked at before it is mapped.
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
    int unsealed = memfd_create("x", MFD_CLOEXEC);
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

}  // namespace

int main(int argc, char** argv) {
    int rounds = argc > 1 ? std::atoi(argv[1]) : 60;
    foreign_heaps();
    heap_is_reused();
    for (int world : {2, 3, 5}) {
        on_ranks(world, [&](Group& g) {
            std::mt19937 rng(42);
            for (int i = 0; i < rounds; ++i) one_operation(g, rng);
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
    // No lap: a writer that lags a whole lap behind may tear a record, which readers can only mostly notice.
    ring::Writer writer("", "{}", 0, 1, 4096);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&writer, t] {
            uint16_t comm = writer.add_comm("c" + std::to_string(t), "shm", "u", "0", 0, 1);
            for (uint64_t i = 1; i <= 1000; ++i) {
                ring::NewRecord record;
                record.comm = comm;
                record.seq = i;
                record.start_now = true;
                writer.finish(writer.begin(record), ring::State::kCompleted, 0);
            }
        });
    }
    for (auto& t : threads) t.join();
    expect(writer.header().rec_next.load() == 4000, "records");
    std::puts("native core: all operations right");
    return 0;
}
