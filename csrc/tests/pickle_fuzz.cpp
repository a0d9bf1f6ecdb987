// Feeds damaged pickles to the dump reader under the sanitizers: it must read or refuse any bytes.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "recorder/dump_columns.hpp"

using namespace unicomm::pickle;

namespace {

void add_text(std::string& out, const char* text) {
    std::string t(text);
    out += '\x8c';
    out += static_cast<char>(t.size());
    out += t;
    out += '\x94';
}

// A dump as Python's protocol 4 writes it, with most opcodes.
std::string valid() {
    std::string out = "\x80\x04}\x94(";
    add_text(out, "pg_config");
    out += std::string("}\x94(K\x01N\x88\x89J\x01\x00\x00\x00G\x3f\xf0\x00\x00\x00\x00\x00\x00u", 23);
    out += "\x8a\x0a" + std::string(10, '\x7f');
    out += "C\x02xy";
    add_text(out, "entries");
    out += "]\x94(";
    for (int i = 0; i < 4; ++i) {
        out += "}\x94(";
        add_text(out, "record_id");
        out += 'K';
        out += static_cast<char>(i);
        add_text(out, "process_group");
        out += "h\x03h\x03\x86\x94";
        add_text(out, "input_sizes");
        out += std::string("]\x94]\x94(K\x03M\x00\x04\x65\x61", 12);
        add_text(out, "input_dtypes");
        out += "]\x94";
        add_text(out, "Float");
        out += "a";
        add_text(out, "frames");
        out += "]\x94}\x94(";
        add_text(out, "name");
        out += "Vf\\u00e9\nI12\nL5L\nF1.5\nNu";
        out += "a";
        out += "u";
    }
    out += "eu.";
    return out;
}

}  // namespace

int main(int argc, char** argv) {
    const long rounds = argc > 1 ? std::atol(argv[1]) : 300000;
    const std::string seed = valid();
    std::mt19937 chance(1);
    DumpReader reader;
    long read = 0, refused = 0;
    for (long round = 0; round < rounds; ++round) {
        std::string data = seed;
        const unsigned changes = round == 0 ? 0 : 1 + chance() % 6;
        for (unsigned i = 0; i < changes && !data.empty(); ++i) {
            const size_t at = chance() % data.size();
            switch (chance() % 4) {
                case 0:
                    data[at] = static_cast<char>(chance());
                    break;
                case 1:
                    data.erase(at, 1 + chance() % 4);
                    break;
                case 2:
                    data.insert(at, data.substr(chance() % data.size(), 1 + chance() % 24));
                    break;
                default:
                    data.resize(at);
            }
        }
        try {
            reader.read(data);
            ++read;
        } catch (const Refused&) {
            if (round == 0) return std::puts("the undamaged dump is refused"), 1;
            ++refused;
        }
        reader.clear();
    }
    std::printf("%ld read, %ld refused\n", read, refused);
    return read == 0 || refused == 0;
}
