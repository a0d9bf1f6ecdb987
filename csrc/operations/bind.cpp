// Bindings of the counts.
#include "base/bind.hpp"

#include "operations/counts.hpp"
#include "operations/opcode.hpp"

namespace unicomm {
namespace {

const char* name_or_none(uint32_t code) { return code ? name_of(OpCode(code)) : ""; }

}  // namespace

void bind_operations(nb::module_& m) {
    nb::class_<Counts>(m, "Counts", "How many operations a rank has begun on a communicator.")
        .def(nb::init<int>(), nb::arg("size"))
        .def_rw("entered", &Counts::entered, "Collectives.")
        .def_prop_ro(
            "running", [](const Counts& c) { return name_or_none(c.running); },
            "The collective that runs in native code, or \"\".")
        .def_prop_ro(
            "inside", [](const Counts& c) { return name_or_none(c.inside); },
            "The collective of which this communicator's are parts, or \"\".")
        .def_prop_ro(
            "whole", [](const Counts& c) { return c.whole.load(); },
            "How many collectives there were of which this communicator's are parts.")
        .def("begin_whole", &Counts::begin_whole, nb::arg("code"), "Such a collective begins.")
        .def(
            "end_whole", [](Counts& c) { c.inside = 0; }, "It is over.")
        .def_prop_rw(
            "left", [](const Counts& c) { return c.left.load(); },
            [](Counts& c, bool left) { c.left = left; },
            "Whether a rank has left: then native code takes no operation.")
        .def_prop_rw(
            "hearing", [](const Counts& c) { return c.hearing.load(); },
            [](Counts& c, bool hearing) { c.hearing = hearing; },
            "Whether what another rank has told is being read.")
        .def("next", &Counts::next, nb::arg("peer"), nb::arg("send"), nb::arg("part") = false,
             "Counts a message without a tag to or from `peer`; returns its number. `part`: of a collective.")
        .def("of", &Counts::of, nb::arg("peer"), nb::arg("send"), nb::arg("part") = false,
             "How many messages there were to or from `peer`.");
}

}  // namespace unicomm
