// One rank's end of a shared-memory communicator.
//
// Collectives advance in rounds, which all ranks count alike. In round k a rank fills its slot k % 2,
// publishes its announcement k % 2 and then reads those of the others. Before it fills slot k % 2 again, in
// round k + 2, it has seen every rank in round k + 1, and a rank enters round k + 1 only after it has read
// everything of round k: so no trailing barrier is needed. The first round of an operation carries its
// signature. All ranks therefore see a mismatch in the same round, before any of them has written to a user's
// tensor, and all stay in step.
//
// Point-to-point messages go through a ring of chunks per ordered pair and do not use the rounds.
//
// A method returns a Fault. Timeouts, lost peers and aborts break the group: it tells the other ranks, and
// every later operation returns the same fault.
#pragma once
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "operations/dtype.hpp"
#include "reduce/fold.hpp"
#include "shm/fast_operations.hpp"
#include "shm/memory/heap.hpp"
#include "shm/memory/peer_memory.hpp"
#include "shm/memory/segment.hpp"
#include "shm/staging.hpp"
#include "shm/waiting/culprits.hpp"
#include "shm/waiting/deadlock.hpp"
#include "shm/waiting/wait.hpp"

namespace unicomm::shm {

struct Buffer {
    char* data;
    uint64_t bytes;
};

// An operation: what all ranks must agree on, and what only this rank knows.
struct Op {
    uint32_t code = 0;
    DType dtype = DType::kNone;
    Red red = Red::kNone;
    int root = -1;
    uint64_t count = 0;  // elements; 0 if the counts of the ranks may differ
    uint64_t extra = 0;
    double factor = 0;
    uint64_t deadline_ns = 0;  // CLOCK_MONOTONIC
    uint64_t signature() const;
};

struct Message {
    bool send;
    int peer;  // -1: receive from any rank
    Buffer buffer;
    DType dtype;
    uint64_t count;
    uint32_t tag = 0;  // goes to a receive with the same tag
};

// A message on its way, on one side.
struct Transfer {
    static constexpr uint64_t kUnmatched = ~uint64_t{0};
    Message message;
    size_t index = 0;
    uint64_t number = kUnmatched;  // number of the message in its channel
    uint64_t done = 0;             // bytes
    uint64_t offered = 0;          // the tail of the channel once the receiver has read the offer
    bool staged = false;           // the receiver could not read an offer of it
    bool begun = false;            // the first chunk has arrived; an empty message has one, too
    bool finished = false;
    bool fresh = true;  // not looked at yet
    Fault fault{};
    // Of a message that arrived before a receive with its tag: its memory here.
    std::unique_ptr<char[]> memory;
    Transfer* early = nullptr;  // of a receive: the message with its tag that had arrived before
};

// Runs the program's signal handlers if they are due and this is the thread that runs them. Returns true if
// one has raised. Called by threads that have waited for a while, without the GIL.
using SignalCheck = bool (*)();
void set_signal_check(SignalCheck check);

class Exchange;

class Group final : public FastOperations {
  public:
    // `name` appears in the messages of other ranks.
    Group(std::shared_ptr<Segment> segment, int rank, const std::vector<int>& pids,
          const std::string& name = "");
    ~Group() override;

    Fault barrier(const Op& op);
    Fault broadcast(const Op& op, Buffer buffer);
    // Ranks of `reduce` other than the root pass out = nullptr. in == out is allowed.
    Fault all_reduce(const Op& op, const char* in, char* out, uint64_t count);
    Fault all_gather(const Op& op, Buffer in, const std::vector<Buffer>& outs);
    Fault gather(const Op& op, Buffer in, const std::vector<Buffer>& outs);   // outs: only at the root
    Fault scatter(const Op& op, const std::vector<Buffer>& ins, Buffer out);  // ins: only at the root
    Fault reduce_scatter(const Op& op, const std::vector<Buffer>& ins, Buffer out);
    // With `check_sizes` the ranks first compare what each sends with what its peer expects.
    Fault all_to_all(const Op& op, const std::vector<Buffer>& ins, const std::vector<Buffer>& outs,
                     bool check_sizes);
    // All of the above for a group of one rank: nothing is sent.
    void alone(const Op& op, Buffer in, Buffer out);
    // Runs all messages together and returns when all are done. A message that does not fit the tensor of its
    // receiver is refused (kMismatch); the others continue.
    Fault exchange(const std::vector<Message>& messages, uint64_t deadline_ns) override;
    // For a message that is alone, while no operation runs.
    Exchange& single() { return *single_; }
    // Any collective whose tensors have equal parts.
    Fault collective(const Op& op, const Tensor& in, const Tensor& out) override;

    // Has messages that do not fit into the ring read in this process, where they lie, by the `readers`,
    // ranks that can. `proofs`: of the processes of all ranks.
    void offer_memory(std::vector<Proof> proofs, const std::vector<int>& readers);
    void abort() override;  // may be called from any thread
    // Like `abort`, with the cause, which the other ranks get.
    void give_up(FaultCode code, const std::vector<int>& culprits);
    // Keeps operations of all ranks from timing out in the next `seconds`. Replaces what this rank asked for
    // before.
    void expect_slow(double seconds);
    void finalize();
    // Breaks the group if a rank has failed, or if one of these ranks is known to have died. Does not wait.
    Fault lost(const std::vector<int>& ranks);
    // Those of these ranks that have finalized.
    std::vector<int> left(const std::vector<int>& ranks);
    // For other memory that the ranks share: waits until `ready()`, which is checked again after any rank has
    // called `wake`. `awaited` returns the ranks whose action it needs. With `kind`, no other rank can act,
    // so the wait can be part of a deadlock.
    Fault await(const std::function<bool()>& ready, const std::function<std::vector<int>()>& awaited,
                uint64_t deadline_ns, const WaitKind* kind = nullptr);
    void wake() { waiter_.wake_others(); }
    bool announces() const override { return true; }
    void wake_me() override { waiter_.wake_me(); }
    std::mutex& running() override { return running_; }
    void recorded_in(ring::Writer* writer, uint16_t comm) override { deadlock_.recorded_in(writer, comm); }
    DeadlockDetector& deadlock() { return deadlock_; }
    int rank() const override { return rank_; }
    int world() const override { return world_; }
    Segment& segment() { return *segment_; }
    std::vector<int> dead_ranks() const;  // those whose processes have ended
    // The number of collectives whose data were read in place, and of messages that this rank received so.
    uint64_t direct_operations() const { return direct_ops_; }

  private:
    // Rounds: `next_round` waits until the slot of this rank may be filled; `publish` shows it to the others.
    Fault next_round(const Op& op);
    void publish(const Op& op, uint64_t longest);
    Fault await_all(const Op& op);
    Fault await_round(const Op& op, uint64_t round, int only);
    Fault agree();
    Fault first_round(const Op& op, uint64_t longest);  // publish, await all, compare signatures

    // Starts the first round of an operation. Data in the heap are not staged: the other ranks read them in
    // place, and no rank leaves before all have read. `offered` is the data of this rank, or null if they lie
    // elsewhere or are too small. If fewer than `needed` ranks offer theirs, all ranks stage their data by
    // `stage()`, in another round if necessary; else `direct` is set.
    template <class Stage>
    Fault open(const Op& op, uint64_t longest, const char* offered, int needed, bool& direct, Stage stage) {
        for (;;) {
            if (Fault f = next_round(op)) return f;
            offer_ = offered;
            if (!offered) stage();
            if (Fault f = first_round(op, longest)) return f;
            direct = offers_ == needed;
            direct_ops_ += direct;
            if (direct || offers_ == 0) return {};
            offered = nullptr;
        }
    }
    // Starts the n-th round of an operation; the first one is that of `open`.
    template <class Stage>
    Fault begin_round(const Op& op, uint64_t n, uint64_t longest, const char* offered, int needed,
                      bool& direct, Stage stage) {
        if (n == 0) return open(op, longest, offered, needed, direct, stage);
        if (Fault f = next_round(op)) return f;
        stage();
        publish(op, longest);
        return {};
    }
    static const char* offerable(const char* data, uint64_t bytes);
    static const char* offerable(const std::vector<Buffer>& parts);
    // Finds where `bytes` can be read, from `offset` on, of what `rank` offers.
    Fault locate(int rank, uint64_t offset, uint64_t bytes, const char*& data);
    Fault copy_offer(int rank, uint64_t offset, Buffer to, const ResultCopy& result);
    Fault share_chunk(const Op& op, bool first, uint64_t bytes);
    // Whether a rank's process ends now: its files are closed a little before that can be seen.
    bool is_ending(int rank) const;
    Fault reach(int rank, const Offer& offer, uint64_t offset, uint64_t bytes, const char*& data);
    static Offer offer_of(const char* data);
    // Reads what `rank` keeps in place for this rank. `there` is set to false if it cannot be read although
    // the rank is well.
    Fault read_in(int rank, uint64_t at, Buffer to, bool& there);
    Fault leave(const Op& op, int awaited);  // waits for rank `awaited`; -1: all ranks; its own rank: none
    Fault reduce_offered(const Op& op, const std::vector<Buffer>& ins, Buffer out);
    void stage_parts(const std::vector<Buffer>& ins, uint64_t n, uint64_t room);

    // Where the data of this round are: in the announcement, or in a slot. Operations that need only a part
    // of the slot, `span` bytes on every rank, use a different part each time: a cache line is faster to
    // write when it has left the caches of its readers.
    const char* staged(int rank, bool in_line, uint64_t span = ~uint64_t{0});
    char* staging(bool in_line, uint64_t span = ~uint64_t{0});
    uint64_t place(uint64_t span) const;
    uint64_t longest_of_all();
    Fault check_pairs(const Op& op, const std::vector<Buffer>& ins, const std::vector<Buffer>& outs);

    Fault one_shot(const Op& op, const char* in, char* out, uint64_t count);
    Fault two_shot(const Op& op, const char* in, char* out, uint64_t count);
    void learn_factors(const Op& op);

    // Whether the process of `rank` ended before the rank finalized or reported a failure.
    bool killed(int rank);
    // The fault of a rank that has given up, if any. That rank may have published the round that this rank
    // enters, but will not take part any more, so a late rank must not assume that the operation succeeded.
    Fault peer_failure();
    bool relayed_failure(Fault& fault);
    // Runs the program's signal handlers while this thread waits. Returns whether one of them has raised.
    bool interrupted(Fault& fault);
    // Whether a wait must end, and why: an abort, a failed rank, a rank that died, an awaited rank that left,
    // or the deadline. A communicator that is broken for one rank is broken for all, also for ranks that wait
    // for others. With `only_awaited`, the death of another rank ends nothing.
    bool must_stop(const std::vector<int>& awaited, uint64_t deadline_ns, bool deep, Fault& fault,
                   bool only_awaited = false);
    // The same for a wait that can be part of a deadlock.
    bool must_stop_waiting(const std::vector<int>& awaited, const WaitKind& kind, uint64_t deadline_ns,
                           bool deep, Fault& fault);
    Fault break_group(Fault fault);
    Fault group_fault();
    Fault damaged(int rank, const char* what);
    uint64_t patience_ns() const;  // until when ranks have asked the others to wait

    friend class Exchange;

    std::shared_ptr<Segment> segment_;
    int rank_, world_;
    ProcessWatch watch_;
    Waiter waiter_;
    CulpritFinder culprit_finder_;
    DeadlockDetector deadlock_;
    Stager stager_;
    std::vector<int> pids_;
    std::vector<std::unique_ptr<PeerHeap>> heaps_;  // heaps of the other ranks, opened at the first offer
    const char* offer_ = nullptr;                   // is published with the next announcement
    std::vector<bool> readers_;                     // may read long messages of this rank in place
    std::vector<Proof> proofs_;
    std::atomic<uint64_t> direct_ops_{0};
    int offers_ = 0;                          // offers of all ranks in this round
    std::atomic<uint64_t> signals_at_ns_{0};  // when to check for signals again
    uint64_t round_ = 0;
    uint64_t signature_ = 0;  // the last published one
    uint64_t agreed_ = 0;  // the signature that all ranks have in each round of this operation; 0: none yet
    std::vector<double> factors_;
    struct Ends {
        uint64_t sent = 0, received = 0;  // messages that have a number
        uint64_t sends_done = 0, receives_done = 0;
        uint64_t head = 0, tail = 0;  // chunks written for that rank, and read from it
        uint64_t acknowledged = 0;    // of those written: how many that rank is known to have read
    };
    std::vector<Ends> ends_;
    std::unique_ptr<Exchange> single_;
    std::list<Transfer> early_;  // messages that arrived before a receive with their tag, in order
    Shared<bool> aborted_{false}, is_broken_{false};
    std::mutex running_;
    Mutex fault_mutex_;
    Fault broken_;
};

}  // namespace unicomm::shm
