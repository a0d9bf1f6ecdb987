// Shared memory of one communicator: who is there, doorbells to wait on, and a pipe from each rank to each
// other.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "abi.hpp"

namespace mock_nccl {

constexpr int kMaxRanks = 16;
constexpr int kSignals = 8;  // indices of one-sided signals

// Collectives, point-to-point and the exchanges of split and windows do not see each other's messages.
enum Lane : int { kCollective, kPointToPoint, kControl, kLanes };

enum Presence : uint32_t { kAbsent, kPresent, kLeft, kAborted };

// What a rank says it is doing; compared by who gets the message, and only told to the log.
struct Signature {
    char function[24];
    int32_t dtype, op, root;
    uint64_t count;
};

class Segment {
  public:
    // Maps the segment, making it if no rank has; pages appear when they are touched.
    static std::shared_ptr<Segment> open(const std::string& name, std::string* error);
    ~Segment();

    // False with a text when the ranks disagree about their number, or this rank is there already.
    bool attach(int nranks, int rank, std::string* error);
    bool complete(int nranks) const;
    void unlink();
    void set_presence(int rank, Presence state);
    Presence presence(int rank) const;
    int pid(int rank) const;

    uint32_t bell(int rank) const;
    void ring(int rank);
    void ring_all();
    // Sleeps until the bell of `rank` is no longer at `seen`, at most so long.
    void wait(int rank, uint32_t seen, int ms);

    std::atomic<uint64_t>& signals(int to, int from, int index);

    struct Shared;
    Shared* shared() { return shared_; }

  private:
    std::string name_;
    Shared* shared_ = nullptr;
};

// One message on its way; a message is longer or shorter than what the other side expects at its own risk,
// but no byte is written outside the receiver's buffer.
class Transfer {
  public:
    static Transfer send(Lane lane, int me, int to, const void* data, size_t bytes, bool until_taken);
    static Transfer receive(Lane lane, int me, int from, void* data, size_t bytes);
    // Moves what can be moved now; true when something was.
    bool step(Segment& segment, const Signature& mine);
    bool done() const { return done_; }
    bool sending() const { return sending_; }
    int peer() const { return peer_; }
    // The other's signature differed from ours; asked once.
    bool take_mismatch(Signature* theirs);

  private:
    bool step_send(Segment& segment, const Signature& mine);
    bool step_receive(Segment& segment, const Signature& mine);
    Lane lane_;
    int me_, peer_;
    char* data_;
    size_t bytes_, moved_ = 0;
    uint64_t total_ = 0;
    uint32_t end_ = 0;
    bool sending_, until_taken_ = false, written_ = false, started_ = false, done_ = false, mismatch_ = false;
    Signature theirs_;
};

}  // namespace mock_nccl
