// Bindings of the composites. unicomm/symm checks the tensors. A failure is returned as a fault; if nothing
// was written because of what a rank passed, the reason is returned, too.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base/bind.hpp"
#include "operations/tensor.hpp"
#include "shm/dispatch.hpp"
#include "symm/domain.hpp"
#include "symm/rows.hpp"

namespace unicomm {
namespace {

using namespace symm;

// (operation, dtype, reduction, root, relaxed, other values that must agree, seconds)
using Head = std::tuple<uint32_t, int, int, int, bool, uint64_t, double>;
// (address, rows, columns, row step, column step), steps in elements
using TileOf = std::tuple<Address, int64_t, int64_t, int64_t, int64_t>;

Call call_of(const Head& head) {
    auto [op, dtype, red, root, relaxed, more, timeout] = head;
    return {op,   static_cast<DType>(dtype), static_cast<Red>(red), root, relaxed,
            more, deadline_after(timeout)};
}

Tensor read(nb::handle object) {
    Tensor t;
    if (!read_tensor(object.ptr(), t)) throw nb::python_error();
    return t;
}

template <class F>
nb::object run(SymmDomain& end, F f) {
    Composites* composites = end.composites();
    if (!composites) throw nb::attribute_error("the domain is not open");
    Fault fault;
    {
        GilReleased release;
        std::lock_guard lock(end.running());
        fault = f(*composites);
    }
    return fault_tuple(fault);
}

std::vector<Tile> tiles_of(const std::vector<TileOf>& tiles) {
    std::vector<Tile> out;
    for (auto [address, rows, columns, row_step, column_step] : tiles) {
        out.push_back({at<char>(address), rows, columns, row_step, column_step});
    }
    return out;
}

}  // namespace

void bind_composites(nb::class_<SymmDomain>& end) {
    end.def_static("said_bytes", &Composites::said_bytes, nb::arg("world"),
                   "Bytes of symmetric memory that `open` needs.")
        .def("open", &SymmDomain::open, nb::arg("rank"), nb::arg("world"), nb::arg("said"))
        .def(
            "meet",
            [](SymmDomain& e, Head head, const std::vector<nb::object>& tensors) {
                std::vector<Memory> memories;
                for (const nb::object& tensor : tensors) memories.push_back(memory_of(read(tensor)));
                return run(e, [&](Composites& c) { return c.meet(call_of(head), memories); });
            },
            nb::sig("def meet(self, head: SymmHead, tensors: list[Tensor], /) -> Fault | None"))
        .def(
            "broadcast",
            [](SymmDomain& e, Head head, nb::handle tensor) {
                Memory memory = memory_of(read(tensor));
                return run(e, [&](Composites& c) { return c.broadcast(call_of(head), memory); });
            },
            nb::sig("def broadcast(self, head: SymmHead, tensor: Tensor, /) -> Fault | None"))
        .def(
            "all_to_all",
            [](SymmDomain& e, Head head, nb::handle input, nb::handle out) {
                Memory in = memory_of(read(input)), to = memory_of(read(out));
                return run(e, [&](Composites& c) { return c.all_to_all(call_of(head), in, to.data); });
            },
            nb::sig("def all_to_all(self, head: SymmHead, input: Tensor, out: Tensor, /) -> Fault | None"))
        .def(
            "all_to_all_v",
            [](SymmDomain& e, Head head, nb::handle input, nb::handle out,
               const std::vector<int64_t>& splits) {
                Tensor in = read(input), to = read(out);
                std::vector<int64_t> came(splits.size());
                Refusal refusal;
                nb::object fault = run(e, [&](Composites& c) {
                    return c.all_to_all_v(call_of(head), rows_of(in), rows_of(to), splits.data(), came.data(),
                                          refusal);
                });
                return nb::make_tuple(fault, refusal_tuple(refusal), came);
            },
            nb::sig("def all_to_all_v(self, head: SymmHead, input: Tensor, out: Tensor, splits: list[int], "
                    "/) -> tuple[Fault | None, SymmRefusal | None, list[int]]"))
        .def(
            "dispatch",
            [](SymmDomain& e, Head head, nb::handle input, nb::handle out, nb::handle splits,
               nb::handle results, int64_t align) {
                Tensor in = read(input), to = read(out), s = read(splits), r = read(results);
                Refusal refusal;
                nb::object fault = run(e, [&](Composites& c) {
                    return c.dispatch(call_of(head), rows_of(in), rows_of(to), numbers_of(s), numbers_of(r),
                                      int(s.numel / c.world()), align, refusal);
                });
                return nb::make_tuple(fault, refusal_tuple(refusal));
            },
            nb::sig("def dispatch(self, head: SymmHead, input: Tensor, out: Tensor, splits: Tensor, results: "
                    "Tensor, align: int, /) -> tuple[Fault | None, SymmRefusal | None]"))
        .def(
            "combine",
            [](SymmDomain& e, Head head, nb::handle input, nb::handle out, nb::handle splits,
               nb::handle results) {
                Tensor in = read(input), to = read(out), s = read(splits), r = read(results);
                Refusal refusal;
                nb::object fault = run(e, [&](Composites& c) {
                    return c.combine(call_of(head), rows_of(in), rows_of(to), numbers_of(s), numbers_of(r),
                                     int(s.numel / 2 / c.world()), refusal);
                });
                return nb::make_tuple(fault, refusal_tuple(refusal));
            },
            nb::sig("def combine(self, head: SymmHead, input: Tensor, out: Tensor, splits: Tensor, results: "
                    "Tensor, /) -> tuple[Fault | None, SymmRefusal | None]"))
        .def(
            "one_shot",
            [](SymmDomain& e, Head head, nb::handle input, nb::handle out) {
                Memory in = memory_of(read(input)), to = memory_of(read(out));
                return run(e, [&](Composites& c) { return c.one_shot(call_of(head), in, to.data); });
            },
            nb::sig("def one_shot(self, head: SymmHead, input: Tensor, out: Tensor, /) -> Fault | None"))
        .def(
            "two_shot",
            [](SymmDomain& e, Head head, nb::handle input) {
                Memory in = memory_of(read(input));
                return run(e, [&](Composites& c) { return c.two_shot(call_of(head), in); });
            },
            nb::sig("def two_shot(self, head: SymmHead, input: Tensor, /) -> Fault | None"))
        .def(
            "reduce_scatter",
            [](SymmDomain& e, Head head, nb::handle input, nb::handle out, int64_t rows) {
                Memory in = memory_of(read(input)), to = memory_of(read(out));
                return run(e,
                           [&](Composites& c) { return c.reduce_scatter(call_of(head), in, rows, to.data); });
            },
            nb::sig("def reduce_scatter(self, head: SymmHead, input: Tensor, out: Tensor, rows: int, /) -> "
                    "Fault | None"))
        .def(
            "reduce_tiles",
            [](SymmDomain& e, Head head, const std::vector<TileOf>& ins, const std::vector<int>& owners,
               const std::vector<TileOf>& outs) {
                auto from = tiles_of(ins), to = tiles_of(outs);
                return run(e, [&](Composites& c) { return c.reduce_tiles(call_of(head), from, owners, to); });
            },
            nb::sig("def reduce_tiles(self, head: SymmHead, ins: list[SymmTile], owners: list[int], outs: "
                    "list[SymmTile], /) -> Fault | None"));
}

}  // namespace unicomm
