// Collectives over a transport's messages. All wait until they are over, or until the transport is stopped.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "operations/dtype.hpp"
#include "operations/reduction.hpp"
#include "transport/transport.hpp"

namespace unicomm::transport {

struct Piece {
    const char* data = nullptr;
    size_t bytes = 0;
};

// The first step of every collective: each rank sends every other one a slot with what it calls, and with its
// data if they are few. So small collectives need one message each way. Its `members` are all ranks of the
// transport, or some; they are numbered in their order, and wherever a member is meant, that number is.
class Slots {
  public:
    static constexpr size_t kHead = 64;
    // The bytes of a head that all ranks have in common; the rest of it is the rank's own.
    static constexpr size_t kCommon = 40;
    // Bytes of a rank's data that fit into a slot, if every rank needs them all. Between two ranks no way
    // sends fewer bytes; among more, others send fewer, but take more steps.
    static constexpr size_t most(int size) {
        return size == 2 ? 1 << 20 : size <= 4 ? 1 << 17 : size <= 8 ? 1 << 16 : 1 << 14;
    }
    // The same for the data of one rank for one other, of which no way sends fewer: memory is the limit.
    static constexpr size_t most_for_each(int size) {
        return size == 2 ? 1 << 20 : size <= 4 ? 1 << 17 : 1 << 16;
    }
    // More are sent from where they are, after the slots: two copies cost more than a second step.
    static constexpr size_t kMostCopied = 1 << 17;
    // `most` and `most_for_each` between `size` hosts whose leaders send for all their ranks.
    static constexpr size_t most_of_host(int size) { return std::min(most(size), kMostOfHost); }
    static constexpr size_t most_of_host_for_each(int size) {
        return std::min(most_for_each(size), kMostOfHost);
    }

    explicit Slots(std::shared_ptr<Transport> transport);
    // `room`: bytes of a slot. This rank is among the `members`.
    Slots(std::shared_ptr<Transport> transport, std::vector<int> members, size_t room);

    // Exchanges heads of `kHead` bytes and data.
    Ended gather(const char* head, const void* data, size_t bytes);
    // The same for a caller that waits by itself, with the transport, until `arrived`. The data of each slot
    // are `first` and then the piece for that member, which must fit into it; this rank's own piece goes to
    // its slot. Throw Failure.
    void start(const char* head, Piece first, const std::vector<Piece>& pieces);
    void start_same(const char* head, Piece first, Piece for_all);
    bool arrived();
    // Of the last gather:
    bool alike() const;
    const char* head(int member) const { return slot(member); }
    const char* data(int member) const { return slot(member) + kHead; }
    // Where a member's data may be received after a gather whose slots had none.
    char* room_of(int member) { return slot(member) + kHead; }
    size_t bytes(int member) const { return lengths_[size_t(member)] - kHead; }

  private:
    static constexpr size_t kMostOfHost = 1 << 18;

    int size() const { return int(members_.size()); }
    char* slot(int member) const { return memory_ + size_t(member) * (kHead + room_); }
    size_t write(char* to, const char* head, Piece first, Piece piece) const;
    void receive_all();

    std::shared_ptr<Transport> transport_;
    const std::vector<int> members_;
    const size_t room_;
    int me_ = 0;
    char* memory_ = nullptr;    // held by the transport
    char* outgoing_ = nullptr;  // the same; for slots that differ, made when there are some
    std::vector<size_t> lengths_;
    std::vector<Request*> receives_, sends_;  // under way
};

// The requests of a collective.
class Group {
  public:
    explicit Group(Transport& transport) : transport_(transport) {}
    void add_send(Request* request) { requests_.push_back({request, 0}); }
    void add_receive(Request* request, size_t bytes) { requests_.push_back({request, bytes}); }
    // Throws a Failure if a message was not as long as its receive.
    bool over() {
        while (!requests_.empty() && requests_.back().request->done) {
            const auto [request, bytes] = requests_.back();
            if (!request->send) check_length(*request, bytes);
            transport_.release(request);
            requests_.pop_back();
        }
        return requests_.empty();
    }
    static void check_length(const Request& request, size_t bytes) {
        if (request.cut || request.length != bytes) throw Failure("a part of another size");
    }

  private:
    struct Expected {
        Request* request;
        size_t bytes;
    };

    Transport& transport_;
    std::vector<Expected> requests_;
};

// Exchanges a message with every rank: UCX connects with the first one.
Ended greet(Transport& transport, uint64_t deadline);

struct Share {
    char* data = nullptr;
    size_t bytes = 0;
};

// Every rank gives a share to each rank, which folds what it gets in order of ranks, in chunks; a folded
// chunk goes on at once to those that want it.
struct Reduction {
    DType dtype = DType::kNone;
    Red red = Red::kSum;
    std::vector<double> factors;
    std::vector<Share> shares;  // for each rank; this rank's own as well
    char* out = nullptr;        // of as many bytes as this rank's own share, and may be that share
    std::vector<int> to;        // ranks that get what this rank folds
    std::vector<int> from;      // ranks whose folded share comes back, into `shares`
    size_t chunk = 0;           // bytes, a multiple of 16
};
Ended reduce(Transport& transport, const Reduction& reduction);

// The root gives each other rank a share, chunk by chunk, and each passes its own on to the others.
Ended broadcast(Transport& transport, char* data, size_t bytes, int root, size_t chunk);

}  // namespace unicomm::transport
