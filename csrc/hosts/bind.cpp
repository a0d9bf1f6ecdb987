// Bindings of operations on several hosts.
#include "base/bind.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/bind_fault.hpp"
#include "base/clock.hpp"
#include "hosts/fast.hpp"

namespace unicomm {

void bind_hosts(nb::module_& m) {
    using hosts::Fast;
    using hosts::Part;
    m.def("hosts_most_in_slot", &transport::Slots::most_of_host, nb::arg("hosts"),
          "Bytes of a host's data for all others that travel with what its ranks call.");
    m.def("hosts_signature", &hosts::signature, nb::arg("op"), nb::arg("dtype"), nb::arg("how"),
          nb::arg("root"), nb::arg("count"), nb::arg("extra"),
          "A number for what all ranks of several hosts must agree on.");
    nb::enum_<Part>(m, "HostsPart", "The part of an operation that failed.")
        .value("NONE", Part::kNone)
        .value("NEAR", Part::kNear)
        .value("LATE", Part::kLate)
        .value("FAR", Part::kFar);
    nb::class_<Fast, transport::SupervisedOperations>(m, "HostsFast",
                                                      "Operations on several hosts, for a fast path.")
        .def(nb::init<nb::object, nb::object, std::vector<std::vector<int>>, int, bool, double, double,
                      nb::handle>(),
             nb::arg("near"), nb::arg("far"), nb::arg("hosts"), nb::arg("rank"), nb::arg("crowded"),
             nb::arg("slack"), nb::arg("for_others"), nb::arg("supervisor"),
             nb::sig("def __init__(self, near: ShmGroup, far: TransportFast, hosts: Sequence[Sequence[int]], "
                     "rank: int, "
                     "crowded: bool, slack: float, for_others: float, supervisor: object) -> None"),
             "`supervisor` is held weakly.")
        .def(
            "fits",
            [](Fast& f, uint32_t op, int dtype, int red, size_t bytes) {
                return f.fits(OpCode(op), DType(dtype), Red(red), bytes);
            },
            nb::arg("op"), nb::arg("dtype"), nb::arg("red"), nb::arg("bytes"),
            "Whether `run` takes a collective with so many bytes of input.")
        .def(
            "agree",
            [](Fast& f, uint64_t signature, double timeout) {
                Fault fault;
                {
                    GilReleased released;
                    fault = f.agree(signature, deadline_after(timeout));
                }
                return fault_tuple(fault);
            },
            nb::arg("signature"), nb::arg("timeout"),
            nb::sig("def agree(self, signature: int, timeout: float) -> object"),
            "The first step of an operation of the general path. Returns None, or a fault.")
        .def(
            "swap",
            [](Fast& f, nb::bytes mine, double timeout) {
                std::vector<std::string> all;
                Fault fault;
                {
                    GilReleased released;
                    fault = f.swap_bytes({mine.c_str(), mine.size()}, deadline_after(timeout), all);
                }
                nb::list slots;
                for (const std::string& one : all) slots.append(nb::bytes(one.data(), one.size()));
                return nb::make_tuple(fault_tuple(fault), slots);
            },
            nb::arg("mine"), nb::arg("timeout"),
            nb::sig("def swap(self, mine: bytes, timeout: float) -> tuple[object, list[bytes]]"),
            "The leaders exchange bytes. Returns None, or a fault, and the bytes of each host.")
        .def("close", &Fast::close, "Lets go of the host's memory; it takes no operation any more.")
        .def("over", &Fast::over, "A failed operation is over, whose cause is known.")
        .def_prop_ro("awaited_near", &Fast::awaited_near,
                     nb::sig("def awaited_near(self) -> list[tuple[int, bool, int, int]]"),
                     "The messages within the host that run, or have failed, as `TransportFast.awaited`.")
        .def_prop_ro("by_columns", &Fast::by_columns, "Whether small collectives go by the columns.")
        .def_prop_ro("failed_in", &Fast::failed_in, "Where the last operation failed.");
}

}  // namespace unicomm
