// Bindings of the dump reader (columns as numpy arrays, the rest as Python objects) and of the dump signal.
#include <nanobind/ndarray.h>

#include <memory>

#include "base/bind.hpp"
#include "recorder/dump_columns.hpp"
#include "recorder/dump_signal.hpp"

namespace unicomm {
namespace {

using pickle::account;
using pickle::DumpReader;
using pickle::Kind;
using pickle::Reader;
using pickle::Refused;
using pickle::Sequences;
using pickle::Value;

constexpr int kMaxDepth = 100;
// Bytes of Python's objects at most: a number with its place in a list or dict; a text, bytes or container
// without what it holds.
constexpr uint64_t kItem = 64, kObject = 256;
constexpr uint64_t kWidest = 4;                 // bytes of a character in Python's texts
constexpr uint64_t kKept = uint64_t{64} << 20;  // bytes that a reader keeps for the next dump

nb::object text_of(const Reader& tree, uint64_t id) {
    std::string_view text = tree.texts[static_cast<uint32_t>(id)];
    account.make(kObject + kWidest * text.size());  // each time: pickle's memo makes a text of two bytes
    // Like Python's unpickler, accepts lone surrogates.
    PyObject* made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass");
    if (!made) {
        PyErr_Clear();
        throw Refused("a text is not UTF-8");
    }
    return nb::steal(made);
}

nb::object big_number(const Value& v) {
    account.make(kObject + v.length);
    PyObject* made = nullptr;
    if (v.decimal) {
        made = PyLong_FromString(std::string(v.data, v.length).c_str(), nullptr, 10);
    } else {
        nb::bytes bytes(v.data, v.length);
        return nb::borrow(reinterpret_cast<PyObject*>(&PyLong_Type))
            .attr("from_bytes")(bytes, "little", nb::arg("signed") = true);
    }
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

// Converts the tree to Python objects. A container that pickle's memo shares becomes one object.
class Objects {
  public:
    explicit Objects(const Reader& tree) : tree_(tree), made_(tree.containers.size()) {}

    nb::object operator()(const Value& v, int depth = 0) {
        switch (v.kind) {
            case Kind::kNone:
                return nb::none();
            case Kind::kBool:
                return nb::bool_(v.integer != 0);
            case Kind::kInt:
                return nb::int_(v.integer);
            case Kind::kBigInt:
                return big_number(v);
            case Kind::kFloat:
                return nb::float_(v.real);
            case Kind::kText:
                return text_of(tree_, v.index);
            case Kind::kBytes:
                account.make(kObject + v.length);
                return nb::bytes(v.data, v.length);
            default:
                return container(v, depth);
        }
    }

  private:
    nb::object container(const Value& v, int depth) {
        Made& made = made_[v.index];
        if (made.object.is_valid()) return made.object;
        if (made.begun) throw Refused("a container holds itself");
        if (depth == kMaxDepth) throw Refused("containers lie deeper than 100 in each other");
        made.begun = true;
        account.make(kObject + kItem * tree_.count(v));
        nb::object out;
        if (v.kind == Kind::kDict) {
            nb::dict dict;
            tree_.for_each_stretch(v, [&](std::span<const Value> items) {
                for (size_t i = 0; i + 1 < items.size(); i += 2) {
                    if (items[i].kind >= Kind::kList && items[i].kind != Kind::kTuple)
                        throw Refused(std::string("a dict's key is ") + pickle::name_of(items[i].kind));
                    dict[(*this)(items[i], depth + 1)] = (*this)(items[i + 1], depth + 1);
                }
            });
            out = dict;
        } else {
            nb::list list;
            tree_.for_each_stretch(v, [&](std::span<const Value> items) {
                for (const Value& item : items) list.append((*this)(item, depth + 1));
            });
            out = v.kind == Kind::kTuple ? nb::object(nb::tuple(list)) : nb::object(list);
        }
        made.object = out;
        return out;
    }

    struct Made {
        nb::object object;
        bool begun = false;
    };
    const Reader& tree_;
    pickle::Vector<Made> made_;
};

template <class To, class From>
nb::object array_of(const pickle::Vector<From>& column) {
    auto* data = new To[column.size() + 1];
    std::copy(column.begin(), column.end(), data);
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<To*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, To, nb::ndim<1>>(data, {column.size()}, owner));
}

template <class F>
nb::list list_of(const Sequences& table, F&& object) {
    nb::list out;
    for (uint32_t i = 0; i < table.size(); ++i) {
        auto sequence = table[i];
        account.make(kObject + kItem * sequence.size());
        nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(sequence.size())));
        for (size_t k = 0; k < sequence.size(); ++k)
            PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(k), object(k, sequence[k]).release().ptr());
        out.append(tuple);
    }
    return out;
}

nb::list list_of(const Reader& tree, const DumpReader::Column& column) {
    nb::list out;
    for (uint32_t text : column.texts()) out.append(text_of(tree, text));
    return out;
}

nb::dict columns_of(const DumpReader& dump) {
    const Reader& tree = dump.tree;
    auto text = [&](size_t, uint64_t id) { return text_of(tree, id); };
    auto number = [](size_t, uint64_t n) -> nb::object { return nb::int_(static_cast<int64_t>(n)); };
    nb::dict out;
    Objects objects(tree);
    nb::dict meta;
    tree.for_each_stretch(dump.top, [&](std::span<const Value> items) {
        for (size_t i = 0; i + 1 < items.size(); i += 2)
            if (items[i].kind == Kind::kText && items[i].index != pickle::kEntries)
                meta[objects(items[i])] = objects(items[i + 1]);
    });
    out["meta"] = meta;
    out["record_id"] = array_of<int64_t>(dump.record_id);
    out["pg_id"] = array_of<int64_t>(dump.pg_id);
    out["collective_seq_id"] = array_of<int64_t>(dump.collective_seq_id);
    out["p2p_seq_id"] = array_of<int64_t>(dump.p2p_seq_id);
    out["op_id"] = array_of<int64_t>(dump.op_id);
    out["time_created_ns"] = array_of<int64_t>(dump.time_created);
    out["time_discovered_started_ns"] = array_of<int64_t>(dump.time_started);
    out["time_discovered_completed_ns"] = array_of<int64_t>(dump.time_completed);
    out["timeout_ms"] = array_of<int64_t>(dump.timeout_ms);
    out["duration_ms"] = array_of<double>(dump.duration_ms);
    out["retired"] = array_of<bool>(dump.retired);
    out["is_p2p"] = array_of<bool>(dump.is_p2p);
    out["group"] = array_of<int32_t>(dump.group);
    out["profiling_name"] = array_of<int32_t>(dump.profiling_name);
    out["state"] = array_of<int32_t>(dump.state);
    out["thread"] = array_of<int32_t>(dump.thread);
    out["input_sizes"] = array_of<int32_t>(dump.input_sizes);
    out["output_sizes"] = array_of<int32_t>(dump.output_sizes);
    out["input_dtypes"] = array_of<int32_t>(dump.input_dtypes);
    out["output_dtypes"] = array_of<int32_t>(dump.output_dtypes);
    out["frames"] = array_of<int32_t>(dump.frames);
    out["groups"] = list_of(dump.groups, text);
    out["profiling_names"] = list_of(tree, dump.names);
    out["states"] = list_of(tree, dump.states);
    out["threads"] = list_of(tree, dump.threads);
    nb::list dims = list_of(dump.dims, number);
    out["sizes"] = list_of(dump.shapes, [&](size_t, uint64_t id) -> nb::object { return dims[id]; });
    out["dtypes"] = list_of(dump.text_lists, text);
    nb::list places = list_of(
        dump.places, [&](size_t k, uint64_t v) -> nb::object { return k == 2 ? number(k, v) : text(k, v); });
    out["stacks"] = list_of(dump.stacks, [&](size_t, uint64_t id) -> nb::object { return places[id]; });
    nb::dict extra;
    if (dump.has_async) extra["unicomm_async"] = array_of<bool>(dump.is_async);
    if (dump.has_graph) extra["unicomm_graph"] = array_of<int64_t>(dump.graph);
    if (dump.has_checksums) {
        extra["unicomm_input_checksum"] = array_of<uint64_t>(dump.input_checksum);
        extra["unicomm_output_checksum"] = array_of<uint64_t>(dump.output_checksum);
        extra["unicomm_flags"] = array_of<int64_t>(dump.flags);
    }
    out["extra"] = extra;
    return out;
}

nb::dict read_dump(nb::bytes data, uint64_t most) {
    // The reader and its buffers are reused: most files of a job have about the same size.
    static thread_local std::unique_ptr<DumpReader> dump;
    struct Clear {
        ~Clear() {
            if (dump) dump->clear();
            if (account.held() > kKept) dump.reset();
        }
    } clear;
    for (;;) {
        account.begin(most);
        bool fresh = !dump;
        try {
            if (fresh) dump = std::make_unique<DumpReader>();
            {
                GilReleased released;
                dump->read({data.c_str(), data.size()});
            }
            return columns_of(*dump);
        } catch (const std::bad_alloc&) {
            // What is kept of other dumps may be too much beside this one, which must not depend on them.
            dump.reset();
            if (fresh) throw;
        }
    }
}

}  // namespace

void bind_dump(nb::module_& m) {
    m.def(
        "read_dump", &read_dump, nb::arg("data"), nb::arg("most") = UINT64_MAX,
        nb::sig("def read_dump(data: bytes, most: int = ...) -> dict[str, Any]"),
        "Reads torch's flight recorder dump into columns; ValueError if it is none, MemoryError if it needs "
        "more than `most` bytes.");
    m.def("listen_for_dump_signal", &listen_for_dump_signal, nb::arg("number"),
          "Installs the handler and returns the pipe's read end, one byte a signal.");
    m.def("forget_dump_signal", &forget_dump_signal);
}

}  // namespace unicomm
