// Symmetric memory under a sanitizer. PEs, as threads over one mapping, run the same random program: puts,
// gets, signals, atomics, allocations, teams, and every composite, and check every result. Then one PE gives
// up, and the others must end with the right fault. Run by `make sanitize`.
#include <algorithm>
#include <chrono>

#include "symm/composites.hpp"
#include "symm/tables/tables.hpp"
#include "tests/random_operations.hpp"

using namespace unicomm;
using namespace unicomm::testing;
using namespace unicomm::symm;

namespace {

constexpr uint64_t kHeapBytes = 8 << 20;
const Vtbl& table = host_table();

int sum_at(int world, size_t i) {
    int sum = 0;
    for (int r = 0; r < world; ++r) sum += value(r, i);
    return sum;
}

uint64_t deadline() { return now_ns() + limit_ns; }

void check(int code, const Error& error, const char* what) {
    expect(code == 0, std::string(what) + ": fault " + std::to_string(code) + " " + error.detail);
}

void check(const Fault& fault, const char* what) {
    expect(!fault, std::string(what) + ": fault " + std::to_string(int(fault.code)) + " " + fault.detail);
}

// One PE's end. Every PE makes the same allocations in the same order.
struct Pe {
    Domain domain;
    int rank, world;
    std::unique_ptr<Composites> composites;
    Error error{};

    template <class T>
    T* allocate(size_t n) {
        void* out = nullptr;
        composites->count_meeting();
        check(table.allocate(domain, n * sizeof(T), 64, deadline(), &out, &error), error, "allocate");
        return static_cast<T*>(out);
    }
    void free(void* at) {
        composites->count_meeting(), composites->count_meeting();
        check(table.free(domain, at, deadline(), &error), error, "free");
    }
    void barrier() { check(composites->barrier(deadline(), nullptr), "barrier"); }
    int next() const { return (rank + 1) % world; }
    int previous() const { return (rank + world - 1) % world; }
};

void on_pes(int world, const std::function<void(Pe&)>& body) {
    UniqueId id;
    Error error{};
    check(table.unique_id(world, kHeapBytes, &id, &error), error, "unique_id");
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
        threads.emplace_back([&, rank] {
            Pe pe{nullptr, rank, world, nullptr};
            check(table.init(&id, rank, world, "stress", deadline(), &pe.domain, &pe.error), pe.error,
                  "init");
            void* said = nullptr;
            check(table.allocate(pe.domain, Composites::said_bytes(world), 64, deadline(), &said, &pe.error),
                  pe.error, "allocate");
            pe.composites = std::make_unique<Composites>(table, pe.domain, rank, world, said);
            body(pe);
            table.leave(pe.domain, &pe.error);
            table.release(pe.domain, &pe.error);
        });
    }
    for (auto& t : threads) t.join();
}

Call call_of(uint32_t op, std::mt19937& rng, Red red = Red::kNone, int root = -1) {
    Call call;
    call.op = op;
    call.dtype = DType::kInt32;
    call.red = red;
    call.root = root;
    call.relaxed = rng() % 4 == 0;
    call.deadline_ns = deadline();
    return call;
}

char* bytes_of(int* at) { return reinterpret_cast<char*>(at); }
Memory memory(int* at, size_t n) { return {bytes_of(at), n * sizeof(int)}; }
Rows rows(int* at, size_t n, size_t width) { return {bytes_of(at), int64_t(n), width * sizeof(int)}; }

void fill(int* to, int rank, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = value(rank, i);
}

// Returns words that are zero on all PEs, for signals and counts: memory that was freed keeps what it had.
uint64_t* zeros(Pe& pe, size_t n) {
    auto* words = pe.allocate<uint64_t>(n);
    std::fill_n(words, n, 0);
    pe.barrier();
    return words;
}

// --- one-sided access --------------------------------------------------------------------------------------

void puts_and_gets(Pe& pe, size_t n) {
    int* box = pe.allocate<int>(2 * n);
    std::vector<int> mine(n), got(n);
    fill(mine.data(), pe.rank, n);
    uint64_t bytes = n * sizeof(int);
    check(table.put(pe.domain, box, mine.data(), bytes, pe.next(), nullptr, &pe.error), pe.error, "put");
    check(table.put_nbi(pe.domain, box + n, mine.data(), bytes, pe.previous(), nullptr, &pe.error), pe.error,
          "put_nbi");
    check(table.quiet(pe.domain, nullptr, &pe.error), pe.error, "quiet");
    pe.barrier();
    for (size_t i = 0; i < n; ++i) {
        expect(box[i] == value(pe.previous(), i) && box[n + i] == value(pe.next(), i), "put data");
    }
    check(table.get(pe.domain, got.data(), box, bytes, pe.next(), nullptr, &pe.error), pe.error, "get");
    expect(got == mine, "get data");
    pe.free(box);
}

void signals(Pe& pe, size_t n) {
    int* box = pe.allocate<int>(n);
    uint64_t* word = zeros(pe, 2);
    std::vector<int> mine(n);
    for (uint64_t turn = 1; turn <= 5; ++turn) {
        fill(mine.data(), pe.rank + int(turn), n);
        auto op = turn % 2 ? SignalOp::kSet : SignalOp::kAdd;
        check(table.put_signal(pe.domain, box, mine.data(), n * sizeof(int), word, turn % 2 ? turn : 1, op,
                               pe.next(), nullptr, &pe.error),
              pe.error, "put_signal");
        check(table.wait_signal(pe.domain, word, Compare::kGe, turn, pe.previous(), deadline(), nullptr,
                                &pe.error),
              pe.error, "wait_signal");
        for (size_t i = 0; i < n; ++i) {
            expect(box[i] == value(pe.previous() + int(turn), i), "data before their signal");
        }
        // The sender may write again only when it is told that the data were read.
        check(table.put_signal(pe.domain, nullptr, nullptr, 0, word + 1, 1, SignalOp::kAdd, pe.previous(),
                               nullptr, &pe.error),
              pe.error, "signal");
        check(table.wait_signal(pe.domain, word + 1, Compare::kEq, turn, ~pe.next(), deadline(), nullptr,
                                &pe.error),
              pe.error, "wait for the answer");
    }
    pe.free(word);
    pe.free(box);
}

void atomics(Pe& pe, int root) {
    uint64_t* words = zeros(pe, 2);
    uint64_t before = 0;
    for (int i = 0; i < 50; ++i) {
        check(table.fetch_add(pe.domain, words, 3, root, &before, nullptr, &pe.error), pe.error, "fetch_add");
        for (uint64_t seen = 0;;) {
            check(table.compare_swap(pe.domain, words + 1, seen, seen + 1, root, &before, nullptr, &pe.error),
                  pe.error, "compare_swap");
            if (before == seen) break;
            seen = before;
        }
    }
    pe.barrier();
    auto all = uint64_t(pe.world) * 50;
    if (pe.rank == root) expect(words[0] == 3 * all && words[1] == all, "atomic counts");
    pe.free(words);
}

void allocations(Pe& pe, std::mt19937& rng) {
    std::vector<std::pair<char*, size_t>> held;
    for (int i = 0; i < 12; ++i) {
        if (held.size() > 4 || (!held.empty() && rng() % 3 == 0)) {
            std::swap(held[rng() % held.size()], held.back());
            auto [at, n] = held.back();
            for (size_t k = 0; k < n; k += 97) expect(at[k] == char(n), "allocations do not overlap");
            pe.free(at);
            held.pop_back();
        } else {
            size_t n = rng() % 2 ? rng() % 300 : rng() % 100000;
            char* at = pe.allocate<char>(n);
            std::memset(at, char(n), n);
            held.push_back({at, n});
        }
    }
    for (auto [at, n] : held) pe.free(at);
}

void teams(Pe& pe) {
    Domain team = nullptr;
    int stride = 2, first = pe.rank % stride, size = (pe.world - first + stride - 1) / stride;
    pe.composites->count_meeting();
    check(table.team_split(pe.domain, first, stride, size, deadline(), &team, &pe.error), pe.error, "split");
    check(table.barrier(team, deadline(), nullptr, &pe.error), pe.error, "barrier of a team");
    table.leave(team, &pe.error);
    table.release(team, &pe.error);
}

// --- composites --------------------------------------------------------------------------------------------

void collectives(Pe& pe, std::mt19937& rng, size_t n) {
    int world = pe.world, root = int(rng() % unsigned(world));
    auto w = size_t(world);
    int* x = pe.allocate<int>(n * w);
    int* y = pe.allocate<int>(n * w);
    fill(x, pe.rank, n * w);
    Composites& c = *pe.composites;
    check(c.all_to_all(call_of(1, rng), memory(x, n * w), bytes_of(y)), "all_to_all");
    for (size_t i = 0; i < n * w; ++i) {
        expect(y[i] == value(int(i / std::max<size_t>(n, 1)), size_t(pe.rank) * n + i % n), "all_to_all");
    }
    std::vector<int> out(n * w);
    check(c.one_shot(call_of(2, rng, Red::kSum), memory(x, n * w), bytes_of(out.data())), "one_shot");
    for (size_t i = 0; i < n * w; ++i) expect(out[i] == sum_at(world, i), "one_shot data");
    check(c.reduce_scatter(call_of(3, rng, Red::kSum), memory(x, n * w), 1, bytes_of(out.data())),
          "reduce_scatter");
    for (size_t i = 0; i < n; ++i) expect(out[i] == sum_at(world, size_t(pe.rank) * n + i), "parts");
    pe.barrier();  // a relaxed operation may still be reading x elsewhere
    check(c.two_shot(call_of(4, rng, Red::kSum), memory(x, n * w)), "two_shot");
    for (size_t i = 0; i < n * w; ++i) expect(x[i] == sum_at(world, i), "two_shot data");
    fill(x, pe.rank, n);
    check(c.broadcast(call_of(5, rng, Red::kNone, root), memory(x, n)), "broadcast");
    for (size_t i = 0; i < n; ++i) expect(x[i] == value(root, i), "broadcast data");
    pe.barrier();
    pe.free(y);
    pe.free(x);
}

void tiles(Pe& pe, std::mt19937& rng) {
    constexpr int64_t kSide = 12;
    int* x = pe.allocate<int>(kSide * kSide);
    fill(x, pe.rank, kSide * kSide);
    std::vector<Tile> ins;
    std::vector<int> owners;
    std::vector<Tile> outs;
    std::vector<std::vector<int>> rooms;
    for (int64_t row = 0; row < kSide; row += 4) {
        bool turned = rng() % 2;
        ins.push_back({bytes_of(x + row * kSide), 4, kSide / 2, kSide, turned ? 2 : 1});
        owners.push_back(int(rng() % unsigned(pe.world)));
    }
    for (size_t i = 0; i < ins.size(); ++i) {
        if (owners[i] == pe.rank) rooms.emplace_back(4 * size_t(ins[i].columns));
    }
    for (auto& room : rooms) outs.push_back({bytes_of(room.data()), 4, kSide / 2, kSide / 2, 1});
    check(pe.composites->reduce_tiles(call_of(6, rng, Red::kSum), ins, owners, outs), "reduce_tiles");
    for (size_t i = 0, own = 0; i < ins.size(); ++i) {
        if (owners[i] != pe.rank) continue;
        const std::vector<int>& got = rooms[own++];
        for (int64_t k = 0; k < int64_t(got.size()); ++k) {
            int64_t row = k / ins[i].columns, column = k % ins[i].columns;
            size_t at = size_t(int64_t(i) * 4 * kSide + row * kSide + column * ins[i].column_step);
            expect(got[size_t(k)] == sum_at(pe.world, at), "tiles");
        }
    }
    pe.barrier();
    pe.free(x);
}

// Rows to experts and back: what returns is what was sent.
void experts(Pe& pe, std::mt19937& rng) {
    constexpr size_t kWidth = 5;
    int n = pe.world, per_pe = 1 + int(rng() % 3);
    size_t columns = size_t(n * per_pe);
    std::mt19937 own(unsigned(pe.rank) + 17 * rng());
    size_t in_rows = 6 * columns;
    int64_t align = rng() % 2 ? 8 : 1;
    size_t out_rows = 6 * columns * size_t(n) + 8 * columns;
    int* in = pe.allocate<int>(in_rows * kWidth);
    int* out = pe.allocate<int>(out_rows * kWidth);
    int* back = pe.allocate<int>(in_rows * kWidth);
    auto* splits = pe.allocate<int64_t>(columns);
    auto* came = pe.allocate<int64_t>(2 * columns);
    auto* returned = pe.allocate<int64_t>(2 * columns);
    size_t sent = 0;
    for (size_t k = 0; k < columns; ++k) sent += size_t(splits[k] = int64_t(own() % 6));
    fill(in, pe.rank, sent * kWidth);
    Refusal refusal;
    check(pe.composites->dispatch(call_of(7, rng), rows(in, in_rows, kWidth), rows(out, out_rows, kWidth),
                                  splits, came, per_pe, align, refusal),
          "dispatch");
    expect(refusal.why == Refusal::kNone, "dispatch is not refused");
    pe.barrier();
    check(pe.composites->combine(call_of(8, rng), rows(out, out_rows, kWidth), rows(back, in_rows, kWidth),
                                 came, returned, per_pe, refusal),
          "combine");
    expect(refusal.why == Refusal::kNone, "combine is not refused");
    for (size_t k = 0; k < columns; ++k) expect(returned[k] == splits[k], "splits came back");
    for (size_t i = 0; i < sent * kWidth; ++i) expect(back[i] == in[i], "rows came back");
    pe.barrier();
    // Too little room on every PE, or splits beyond the input of one: all refuse, and go on.
    check(pe.composites->dispatch(call_of(7, rng), rows(in, in_rows, kWidth), rows(out, 0, kWidth), splits,
                                  came, per_pe, align, refusal),
          "dispatch without room");
    pe.barrier();
    if (pe.rank == 0) splits[0] = int64_t(in_rows) + 1;
    refusal = {};
    check(pe.composites->dispatch(call_of(7, rng), rows(in, in_rows, kWidth), rows(out, out_rows, kWidth),
                                  splits, came, per_pe, align, refusal),
          "dispatch of wrong splits");
    expect(refusal.why == Refusal::kSplits && refusal.pe == 0, "refused");
    std::vector<int64_t> some(size_t(n), 2), got(size_t(n), 0);
    refusal = {};
    check(pe.composites->all_to_all_v(call_of(9, rng), rows(in, in_rows, kWidth), rows(out, out_rows, kWidth),
                                      some.data(), got.data(), refusal),
          "all_to_all_v");
    expect(got == some, "all_to_all_v rows");
    pe.barrier();
    for (void* at : {static_cast<void*>(returned), static_cast<void*>(came), static_cast<void*>(splits),
                     static_cast<void*>(back), static_cast<void*>(out), static_cast<void*>(in)}) {
        pe.free(at);
    }
}

void mismatch(Pe& pe, std::mt19937& rng) {
    int* x = pe.allocate<int>(8);
    Fault f =
        pe.composites->broadcast(call_of(5, rng, Red::kNone, pe.rank == 0 ? 0 : pe.world - 1), memory(x, 8));
    expect(f.code == FaultCode::kMismatch && f.claims.size() == size_t(pe.world), "other roots");
    pe.barrier();
    pe.free(x);
}

void program(Pe& pe, unsigned seed, int steps) {
    std::mt19937 rng(seed);  // alike on all PEs
    const size_t sizes[] = {0, 1, 16, 1000, 5003, 40000};
    for (int i = 0; i < steps; ++i) {
        size_t n = sizes[rng() % 6];
        switch (rng() % 9) {
            case 0:
                puts_and_gets(pe, n);
                break;
            case 1:
                signals(pe, n);
                break;
            case 2:
                atomics(pe, int(rng() % unsigned(pe.world)));
                break;
            case 3:
                allocations(pe, rng);
                break;
            case 4:
                teams(pe);
                break;
            case 5:
                collectives(pe, rng, n);
                break;
            case 6:
                tiles(pe, rng);
                break;
            case 7:
                experts(pe, rng);
                break;
            default:
                if (pe.world > 1) mismatch(pe, rng);
        }
    }
}

// --- the end of a PE ---------------------------------------------------------------------------------------

void ends(int world) {
    on_pes(world, [&](Pe& pe) {  // aborted by another thread while it waits
        uint64_t* word = zeros(pe, 1);
        std::thread other;
        if (pe.rank == 0) {
            other = std::thread([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
                Error error{};
                table.abort(pe.domain, 0, nullptr, &error);
            });
        }
        int code =
            table.wait_signal(pe.domain, word, Compare::kGe, 1, pe.next(), deadline(), nullptr, &pe.error);
        expect(code == int(FaultCode::kAborted), "aborted while it waits: " + std::to_string(code));
        if (other.joinable()) other.join();
        expect(bool(pe.composites->barrier(deadline(), nullptr)), "nothing follows an abort");
    });
    on_pes(world, [&](Pe& pe) {  // rank 0 leaves
        if (pe.rank == 0) return;
        Fault f = pe.composites->barrier(deadline(), nullptr);
        expect(f.code == FaultCode::kPeerLost && f.culprits == std::vector<int>{0}, "a PE that left");
    });
    on_pes(world, [&](Pe& pe) {  // a signal that never comes
        uint64_t* word = zeros(pe, 1);
        if (pe.rank == 0) {
            int code = table.wait_signal(pe.domain, word, Compare::kGe, 1, pe.next(), now_ns() + 30000000,
                                         nullptr, &pe.error);
            expect(code == int(FaultCode::kTimeout), "a signal that never comes");
        } else {
            expect(bool(pe.composites->barrier(deadline(), nullptr)), "the others are told");
        }
    });
}

}  // namespace

int main(int argc, char** argv) {
    unsigned seeds = argc > 1 ? unsigned(std::atoi(argv[1])) : 10;
    for (int world : {1, 2, 3, 5}) {
        for (unsigned seed = 1; seed <= seeds; ++seed) {
            on_pes(world, [&](Pe& pe) { program(pe, seed, 12); });
        }
        if (world > 1) ends(world);
    }
    std::puts("symmetric memory: all operations right");
    return 0;
}
