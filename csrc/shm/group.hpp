// One rank's end of a shared-memory communicator.
//
// Collectives advance in rounds that all ranks count alike. In round k a rank fills its slot k%2,
// publishes its announcement k%2 and then reads the others'. Before it fills slot k%2 again, in round
// k+2, it has seen every rank in round k+1, which a rank enters only when it has read everything of
// round k: no trailing barrier is needed. The first round of an operation carries its signature, so
// that all ranks see a mismatch in the same round, before any of them has written to a user's tensor,
// and all stay in step.
//
// Point-to-point messages go through a ring of chunks for each ordered pair and do not touch the rounds.
//
// A method returns a Fault. Timeouts, lost peers and aborts break the group: it tells the others and
// every later operation returns the same fault.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/error.hpp"
#include "reduce/reduce.hpp"
#include "shm/deadlock.hpp"
#include "shm/heap.hpp"
#include "shm/segment.hpp"
#include "shm/staging.hpp"
#include "shm/wait.hpp"
#include "shm/waits.hpp"

namespace unicomm::shm {

struct Piece {
    char* data;
    uint64_t bytes;
};

// What all ranks must agree on (claim), and what only this rank knows.
struct Op {
    uint32_t code = 0;
    DType dtype = DType::kNone;
    Red red = Red::kNone;
    int root = -1;
    uint64_t count = 0;  // elements; 0 where the ranks' counts may differ
    uint64_t extra = 0;
    double factor = 0;
    uint64_t deadline_ns = 0;  // CLOCK_MONOTONIC
    uint64_t signature() const;
};

struct Message {
    bool send;
    int peer;  // -1: receive from any rank
    Piece piece;
    DType dtype;
    uint64_t count;
};

// Runs what the program does at signals that have come, if this thread is the one that does; true when it
// raised. Called by threads that have waited for a while, without the interpreter's lock.
using SignalCheck = bool (*)();
void set_signal_check(SignalCheck check);

class Group {
  public:
    // `name` is for what others read.
    Group(std::shared_ptr<Segment> segment, int rank, const std::vector<int>& pids,
          const std::string& name = "");

    Fault barrier(const Op& op);
    Fault broadcast(const Op& op, Piece buffer);
    // Non-roots of `reduce` pass out = nullptr. in == out is allowed.
    Fault all_reduce(const Op& op, const char* in, char* out, uint64_t count);
    Fault all_gather(const Op& op, Piece in, const std::vector<Piece>& outs);
    Fault gather(const Op& op, Piece in, const std::vector<Piece>& outs);   // outs: at the root only
    Fault scatter(const Op& op, const std::vector<Piece>& ins, Piece out);  // ins: at the root only
    Fault reduce_scatter(const Op& op, const std::vector<Piece>& ins, Piece out);
    // With `check_sizes` the ranks first compare what each sends with what its peer expects.
    Fault all_to_all(const Op& op, const std::vector<Piece>& ins, const std::vector<Piece>& outs,
                     bool check_sizes);
    // All of the above for a group of one rank: nothing is sent.
    void alone(const Op& op, const std::vector<Piece>& ins, const std::vector<Piece>& outs);
    // Runs all messages together; returns when all are done. A message that does not fit its receiver's
    // tensor is refused (kMismatch) and the others go on.
    Fault exchange(const std::vector<Message>& messages, uint64_t deadline_ns);

    void abort();  // from any thread
    // No operation of any rank times out in the next `seconds`; replaces what this rank asked for before.
    void expect_slow(double seconds);
    void finalize();
    // Whether one of these ranks is known to have failed, left or died, which breaks the group; does not
    // wait.
    Fault lost(const std::vector<int>& ranks);
    // For what ranks write into other memory that they share: waits until `ready`, which is asked again when
    // somebody has called `wake`. `awaited`: whose doing it would be. With `kind` nobody else's, so that
    // others may see in it a circle of ranks that wait for each other.
    Fault await(const std::function<bool()>& ready, const std::function<std::vector<int>()>& awaited,
                uint64_t deadline_ns, const WaitKind* kind = nullptr);
    void wake() { waiter_.wake_others(); }
    std::mutex& running() { return running_; }  // held while an operation runs
    Deadlock& deadlock() { return deadlock_; }
    int rank() const { return rank_; }
    int world() const { return world_; }
    Segment& segment() { return *segment_; }
    std::vector<int> dead_ranks() const;
    // Collectives whose data were read where they were, and messages that this rank received so.
    uint64_t direct_operations() const { return direct_ops_; }

  private:
    // Rounds. `next_round` waits until this rank's slot may be filled; `publish` shows it to the others.
    Fault next_round(const Op& op);
    void publish(const Op& op, uint64_t longest);
    Fault await_all(const Op& op);
    Fault await_round(const Op& op, uint64_t round, int only);
    Fault agree();
    Fault first_round(const Op& op, uint64_t longest);  // publish, await all, agree

    // Data in the heap are not staged: the others read them where they are, and nobody leaves before all
    // have. `offered` is this rank's data, or null where they are elsewhere or not worth it. Unless as many
    // as `needed` offer theirs (then `direct` is set), all stage them by `stage()`, if need be in another
    // round.
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
    static const char* offerable(const char* data, uint64_t bytes);
    static const char* offerable(const std::vector<Piece>& parts);
    // Where `bytes` from `offset` on of what `rank` offers can be read.
    Fault locate(int rank, uint64_t offset, uint64_t bytes, const char*& data);
    Fault reach(int rank, const Offer& offer, uint64_t offset, uint64_t bytes, const char*& data);
    static Offer offer_of(const char* data);
    Fault leave(const Op& op, int awaited);  // -1: all ranks; its own: nobody
    Fault reduce_offered(const Op& op, const std::vector<Piece>& ins, Piece out);
    void stage_parts(const std::vector<Piece>& ins, uint64_t n, uint64_t room);

    // Where this round's data are: in the announcement, or in a slot. Operations that need only a part of the
    // slot, `span` bytes on every rank, take another part each time: a line is quicker to write when it has
    // left the caches of those who read it.
    const char* staged(int rank, bool in_line, uint64_t span = ~uint64_t{0});
    char* staging(bool in_line, uint64_t span = ~uint64_t{0});
    uint64_t place(uint64_t span) const;
    uint64_t longest_of_all();
    Fault check_pairs(const Op& op, const std::vector<Piece>& ins, const std::vector<Piece>& outs);

    Fault one_shot(const Op& op, const char* in, char* out, uint64_t count);
    Fault two_shot(const Op& op, const char* in, char* out, uint64_t count);
    void learn_factors(const Op& op);

    // What a rank that gave up said, if one has. It may have published the round that this rank enters, but
    // will not take part any more: a rank that comes later must not believe that the operation succeeded.
    Fault given_up();
    bool relay_failure(Fault& fault);
    // Lets the program's handlers of signals run while this thread waits; whether one of them raised.
    bool interrupted(Fault& fault);
    // Why a wait must end, if it must: abort, a rank that failed, an awaited one that left or died, the
    // deadline. A communicator that is broken for one rank is broken for all, also for those that wait for
    // others.
    bool must_stop(const std::vector<int>& awaited, uint64_t deadline_ns, bool deep, Fault& fault);
    // The same for a rank that has to go on waiting, also when it would for ever.
    bool must_stop_waiting(const std::vector<int>& awaited, const WaitKind& kind, uint64_t deadline_ns,
                           bool deep, Fault& fault);
    Fault break_off(Fault fault);
    Fault why_broken();
    Fault damaged(int rank, const char* what);
    uint64_t patience_ns() const;  // until when the ranks ask each other to wait

    friend class Exchange;

    std::shared_ptr<Segment> segment_;
    int rank_, world_;
    Watch watch_;
    Waiter waiter_;
    Waits waits_;
    Deadlock deadlock_;
    Stager stager_;
    std::vector<int> pids_;
    std::vector<std::unique_ptr<PeerHeap>> heaps_;  // of the other ranks, opened when first offered
    const char* offer_ = nullptr;                   // goes with the next announcement
    std::atomic<uint64_t> direct_ops_{0};
    int offers_ = 0;                          // of all ranks in this round
    std::atomic<uint64_t> signals_at_ns_{0};  // when to look at them again
    uint64_t round_ = 0;
    uint64_t signature_ = 0;  // as published last
    uint64_t agreed_ = 0;  // the signature that all ranks have in each round of this operation; 0: none yet
    std::vector<double> factors_;
    struct Ends {
        uint64_t sent = 0, received = 0;  // messages that have a number
        uint64_t sends_done = 0, receives_done = 0;
        uint64_t head = 0, tail = 0;  // chunks written for that rank, and read of its own
    };
    std::vector<Ends> ends_;
    std::atomic<bool> aborted_{false}, is_broken_{false};
    std::mutex running_;
    std::mutex fault_mutex_;
    Fault broken_;
};

}  // namespace unicomm::shm
