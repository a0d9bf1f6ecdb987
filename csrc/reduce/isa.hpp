// The kernels of an instruction set, and which one this process uses.
#pragma once
#include "reduce/arguments.hpp"
#include "reduce/wire.hpp"

namespace unicomm {

struct Isa {
    const char* name;
    Kernels run, run_exact;
    Encoder encode;
    Decoder decode;
    Converter convert;
    bool (*available)();
};

// Returns the best instruction set of this machine, or the one that set_fold_isa() named.
const Isa& isa();

}  // namespace unicomm
