// One communicator's TCP connections: one to each other rank, by which messages go one behind the other.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace unicomm::tcp {

using transport::Kind;
using transport::Request;

class Streams final : public transport::Transport {
  public:
    // `spin_ns`: for how long a wait polls before it sleeps. Throws SystemFailure.
    Streams(int rank, int size, uint64_t spin_ns);
    // Takes over the connected sockets to the ranks, in their order, with -1 in place of this one's. Throws
    // SystemFailure, and has closed them then.
    void connect(const std::vector<int>& connections);
    ~Streams() override { drop(); }

    Request* send(int peer, const void* data, size_t bytes, Kind kind, uint32_t tag) override;
    // Memory that is too small for its message stays as it is.
    Request* receive(int peer, void* data, size_t bytes, Kind kind, uint32_t tag) override;
    bool flushed() override { return unsent_ == 0; }

  protected:
    bool is_open() const override { return epoll_ >= 0; }
    bool progress() override;
    void sleep(int milliseconds) override;
    bool end(bool given_up) override;
    void abandon(bool forked) override;

  private:
    // What is before the bytes of each message, as it lies in memory: all ranks have this byte order.
    struct Head {
        uint64_t bytes;
        uint32_t tag;
        uint8_t kind;
        uint8_t mark[3];
    };
    static_assert(sizeof(Head) == 16);

    struct Sending {
        Request* request;
        Head head;
        const char* data;
        size_t sent;  // of head and data
    };
    struct Receiving {
        Request* request;
        char* data;
        size_t bytes;
        uint64_t what;   // kind and tag
        uint64_t order;  // among all that were ever begun
    };
    // A message that came before its receive. Its memory may be taken by one while it still comes.
    struct Early {
        uint64_t what, order;
        size_t bytes;
        std::unique_ptr<char[]> data;
        bool whole;
    };
    // What is read from a connection beyond the message that is being read.
    static constexpr size_t kAhead = 4096;

    struct Peer {
        int file = -1;
        bool readable = false;  // there may be something to read
        bool ending = false;    // the system has told an end, which a short read does not show
        bool ended = false;     // nothing comes any more
        bool full = false;      // the system takes no more for now
        std::deque<Sending> sends;
        std::deque<Receiving> receives;
        std::deque<Early> early;
        // The message that is being read: where to, or nowhere; for whom, or for an early one.
        bool in_message = false;
        Head head{};
        char* to = nullptr;
        size_t got = 0;
        Request* request = nullptr;
        // Bytes that were read ahead, between these two.
        size_t begin = 0, end = 0;
        std::unique_ptr<char[]> ahead;
    };

    Peer& peer_of(int rank) { return peers_[size_t(rank)]; }
    bool write(int rank);
    bool read(int rank);
    void watch(int rank, bool writable);
    void look(int milliseconds);
    void take_ahead(int rank);
    void took(int rank, size_t bytes);
    void start_message(int rank);
    void end_message(int rank);
    bool take_early(int rank, const Receiving& receiving);
    static void give(const Receiving& receiving, int rank, size_t length);
    void lost(int rank, int error);

    std::vector<Peer> peers_;
    std::deque<Receiving> from_any_;
    size_t unsent_ = 0;   // messages that the system has not taken whole
    uint64_t order_ = 0;  // of the next receive, or early message
    std::string failed_;  // why nothing can be read any more
    int epoll_ = -1;
    const bool few_;  // so few connections that to read them costs less than to ask which can be read
};

}  // namespace unicomm::tcp
