// Bindings of the counts.
#include "base/bind.hpp"

#include "operations/counts.hpp"
#include "operations/opcode.hpp"

namespace unicomm {

void bind_operations(nb::module_& m) {
    nb::class_<Counts>(m, "Counts", "How many operations a rank has begun on a communicator.")
        .def(nb::init<int>(), nb::arg("size"))
        .def_rw("entered", &Counts::entered, "Collectives.")
        .def_prop_ro(
            "running", [](const Counts& c) { return c.running ? name_of(OpCode(c.running)) : ""; },
            "The collective that runs in native code, or \"\".")
        .def("next", &Counts::next, nb::arg("peer"), nb::arg("send"),
             "Counts a message without a tag to or from `peer`; returns its number.")
        .def(
            "of",
            [](const Counts& c, int peer, bool send) { return (send ? c.sent : c.taken).at(size_t(peer)); },
            nb::arg("peer"), nb::arg("send"), "How many messages there were to or from `peer`.");
}

}  // namespace unicomm
