// Bindings of TCP connections.
#include "base/bind.hpp"

#include <nanobind/stl/vector.h>

#include <memory>
#include <vector>

#include "tcp/streams.hpp"
#include "transport/bound.hpp"

namespace unicomm {
namespace {

struct TcpStreams final : transport::Bound {
    explicit TcpStreams(std::shared_ptr<tcp::Streams> made) : Bound(made), streams(std::move(made)) {}
    std::shared_ptr<tcp::Streams> streams;
};

}  // namespace

void bind_tcp(nb::module_& m) {
    nb::class_<TcpStreams, transport::Bound>(m, "TcpStreams", "One communicator's TCP connections.")
        .def(
            "__init__",
            [](TcpStreams* self, int rank, int size, double spin) {
                new (self) TcpStreams(std::make_shared<tcp::Streams>(rank, size, uint64_t(spin * 1e9)));
            },
            nb::arg("rank"), nb::arg("size"), nb::arg("spin"),
            "`spin`: seconds that a wait polls before it sleeps. Raises OSError.")
        .def(
            "connect",
            [](TcpStreams& s, const std::vector<int>& connections) { s.streams->connect(connections); },
            nb::arg("connections"),
            "Takes over the descriptors of connected sockets to the ranks, with -1 for this one. Raises "
            "OSError, and has closed them then.");
}

}  // namespace unicomm
