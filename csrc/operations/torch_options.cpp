#include "operations/torch_options.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include "base/bind.hpp"

namespace unicomm {

AllReduceOptions all_reduce_options;

namespace {

// Memory of this process, or None where there is none: a wrong guess must not end the process.
nb::object peek(uint64_t address, size_t n) {
    std::array<char, 256> bytes;
    if (n > bytes.size()) n = bytes.size();
    iovec here{bytes.data(), n}, there{reinterpret_cast<void*>(address), n};
    if (process_vm_readv(getpid(), &here, 1, &there, 1, 0) != static_cast<ssize_t>(n)) return nb::none();
    return nb::bytes(bytes.data(), n);
}

void learn(nb::type_object type, size_t value, size_t red, size_t timeout, size_t later, int64_t no_timeout,
           nb::bytes reds) {
    AllReduceOptions o;
    o.value = value;
    o.red = red;
    o.timeout = timeout;
    o.later = later;
    o.no_timeout = no_timeout;
    std::memcpy(o.reds.data(), reds.c_str(), std::min(reds.size(), o.reds.size()));
    o.type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
    all_reduce_options = o;
}

}  // namespace

void bind_torch_options(nb::module_& m) {
    m.def("peek", &peek, nb::arg("address"), nb::arg("n"));
    m.def("learn_all_reduce_options", &learn, nb::arg("type"), nb::arg("value"), nb::arg("red"),
          nb::arg("timeout"), nb::arg("later"), nb::arg("no_timeout"), nb::arg("reds"));
}

}  // namespace unicomm
