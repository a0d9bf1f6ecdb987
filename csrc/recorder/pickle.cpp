// The pickle reader: one loop over opcodes, with its own stack and memo.
#include "recorder/pickle.hpp"

#include <bit>
#include <charconv>
#include <cstring>
#include <limits>

namespace unicomm::pickle {
namespace {

constexpr uint64_t kMaxInput = uint64_t{1} << 31;  // because items are counted in 32 bits
constexpr size_t kMaxNumber = 1024;                // bytes or digits of one number
constexpr size_t kKept = size_t{1} << 20;          // places that a table of texts keeps: each is cleared
static_assert(std::endian::native == std::endian::little);

enum Opcode : uint8_t {
    kMark = '(',
    kStop = '.',
    kInt = 'I',
    kBinInt = 'J',
    kBinInt1 = 'K',
    kBinInt2 = 'M',
    kLong = 'L',
    kFloat = 'F',
    kBinFloat = 'G',
    kNone = 'N',
    kUnicode = 'V',
    kBinUnicode = 'X',
    kBinBytes = 'B',
    kShortBinBytes = 'C',
    kAppend = 'a',
    kAppends = 'e',
    kSetItem = 's',
    kSetItems = 'u',
    kDict = 'd',
    kEmptyDict = '}',
    kList = 'l',
    kEmptyList = ']',
    kTuple = 't',
    kEmptyTuple = ')',
    kGet = 'g',
    kBinGet = 'h',
    kLongBinGet = 'j',
    kPut = 'p',
    kBinPut = 'q',
    kLongBinPut = 'r',
    kProto = 0x80,
    kTuple1 = 0x85,
    kTuple2 = 0x86,
    kTuple3 = 0x87,
    kNewTrue = 0x88,
    kNewFalse = 0x89,
    kLong1 = 0x8a,
    kLong4 = 0x8b,
    kShortBinUnicode = 0x8c,
    kBinUnicode8 = 0x8d,
    kBinBytes8 = 0x8e,
    kMemoize = 0x94,
    kFrame = 0x95,
};

// Names of refused opcodes, for the message.
const char* opcode_name(uint8_t code) {
    switch (code) {
        case 'c':
            return "GLOBAL";
        case 'R':
            return "REDUCE";
        case 'b':
            return "BUILD";
        case 'i':
            return "INST";
        case 'o':
            return "OBJ";
        case 'P':
            return "PERSID";
        case 'Q':
            return "BINPERSID";
        case '0':
            return "POP";
        case '1':
            return "POP_MARK";
        case '2':
            return "DUP";
        case 'S':
            return "STRING";
        case 'T':
            return "BINSTRING";
        case 'U':
            return "SHORT_BINSTRING";
        case 0x81:
            return "NEWOBJ";
        case 0x82:
            return "EXT1";
        case 0x83:
            return "EXT2";
        case 0x84:
            return "EXT4";
        case 0x8f:
            return "EMPTY_SET";
        case 0x90:
            return "ADDITEMS";
        case 0x91:
            return "FROZENSET";
        case 0x92:
            return "NEWOBJ_EX";
        case 0x93:
            return "STACK_GLOBAL";
        case 0x96:
            return "BYTEARRAY8";
        case 0x97:
            return "NEXT_BUFFER";
        case 0x98:
            return "READONLY_BUFFER";
        default:
            return nullptr;
    }
}

uint32_t hash_of(std::string_view text) {
    uint64_t h = 0x9e3779b97f4a7c15ull ^ text.size();
    size_t n = text.size();
    const char* p = text.data();
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        std::memcpy(&word, p, 8);
        h = (h ^ word) * 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    uint64_t tail = 0;
    std::memcpy(&tail, p, n);
    h = (h ^ tail) * 0xc4ceb9fe1a85ec53ull;
    return static_cast<uint32_t>(h ^ (h >> 29));
}

void add_utf8(std::string& out, uint32_t c) {
    if (c < 0x80) {
        out += static_cast<char>(c);
        return;
    }
    if (c < 0x800) {
        out += static_cast<char>(0xc0 | (c >> 6));
    } else {
        if (c < 0x10000) {
            out += static_cast<char>(0xe0 | (c >> 12));
        } else {
            out += static_cast<char>(0xf0 | (c >> 18));
            out += static_cast<char>(0x80 | ((c >> 12) & 63));
        }
        out += static_cast<char>(0x80 | ((c >> 6) & 63));
    }
    out += static_cast<char>(0x80 | (c & 63));
}

// A memo slot that was never filled.
constexpr Value kFree{.kind = Kind::kBytes, .length = UINT32_MAX};
bool is_free(const Value& v) { return v.kind == Kind::kBytes && v.length == UINT32_MAX; }

}  // namespace

const char* name_of(Kind kind) {
    static constexpr const char* kNames[] = {
        "None",   "a truth value", "a number", "a number beyond 64 bits", "a float", "a text", "bytes",
        "a list", "a tuple",       "a dict"};
    return kNames[static_cast<size_t>(kind)];
}

Texts::Texts() : slots_(256) {}

void Texts::clear() {
    texts_.clear();
    hashes_.clear();
    owned_.clear();
    if (slots_.size() > kKept) {
        Vector<uint32_t>(256).swap(slots_);
    } else {
        std::fill(slots_.begin(), slots_.end(), 0);
    }
}

void Texts::grow() {
    Vector<uint32_t> slots(slots_.size() * 2);
    for (uint32_t id = 0; id < texts_.size(); ++id) {
        size_t at = hashes_[id] & (slots.size() - 1);
        while (slots[at]) at = (at + 1) & (slots.size() - 1);
        slots[at] = id + 1;
    }
    slots_.swap(slots);
}

uint32_t Texts::intern(std::string_view text) {
    uint32_t hash = hash_of(text);
    size_t mask = slots_.size() - 1, at = hash & mask;
    for (; slots_[at]; at = (at + 1) & mask) {
        uint32_t id = slots_[at] - 1;
        if (hashes_[id] == hash && texts_[id] == text) return id;
    }
    auto id = static_cast<uint32_t>(texts_.size());
    texts_.push_back(text);
    hashes_.push_back(hash);
    slots_[at] = id + 1;
    if (texts_.size() * 2 > slots_.size()) grow();
    return id;
}

uint32_t Texts::intern_copy(std::string text) {
    account.make(sizeof text + text.capacity());
    return intern(owned_.emplace_back(std::move(text)));
}

void Reader::clear() {
    texts.clear();
    containers.clear();
    stack_.clear();
    memo_.clear();
    items_.clear();
    marks_.clear();
    chunks_.clear();
}

size_t Reader::count(const Value& container) const {
    size_t n = 0;
    for_each_stretch(container, [&](auto items) { n += items.size(); });
    return n;
}

void Reader::refuse(const std::string& why) const {
    throw Refused(why + " at byte " + std::to_string(opcode_ - begin_));
}

const char* Reader::take(uint64_t n) {
    if (n > static_cast<uint64_t>(end_ - at_))
        refuse("the pickle is cut short: an item ends after the input,");
    const char* data = at_;
    at_ += n;
    return data;
}

std::string_view Reader::line() {
    const void* stop = std::memchr(at_, '\n', static_cast<size_t>(end_ - at_));
    if (!stop) refuse("the pickle is cut short: a line has no end,");
    std::string_view text(at_, static_cast<size_t>(static_cast<const char*>(stop) - at_));
    at_ += text.size() + 1;
    return text;
}

template <class T>
T Reader::little() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
}

void Reader::push_text(uint64_t length) {
    const char* data = take(length);
    Value v{.kind = Kind::kText};
    v.index = texts.intern({data, static_cast<size_t>(length)});
    push(v);
}

// Protocol 0: bytes are Latin-1; \uXXXX and \UXXXXXXXX stand for other characters.
void Reader::push_escaped(std::string_view text) {
    account.make(4 * text.size());  // a character may take two bytes, and the text grows by doubling
    std::string out;
    for (size_t i = 0; i < text.size();) {
        auto c = static_cast<uint8_t>(text[i]);
        size_t digits = 0;
        if (c == '\\' && i + 1 < text.size()) digits = text[i + 1] == 'u' ? 4 : text[i + 1] == 'U' ? 8 : 0;
        if (!digits) {
            add_utf8(out, c);
            ++i;
            continue;
        }
        uint32_t code = 0;
        const char* from = text.data() + i + 2;
        const char* to = from + digits;
        if (to > text.data() + text.size() || std::from_chars(from, to, code, 16).ptr != to ||
            code > 0x10ffff)
            refuse("a text has a broken escape,");
        add_utf8(out, code);
        i += 2 + digits;
    }
    Value v{.kind = Kind::kText};
    v.index = texts.intern_copy(std::move(out));
    push(v);
}

void Reader::push_bytes(uint64_t length) {
    Value v{.kind = Kind::kBytes};
    v.data = take(length);
    v.length = static_cast<uint32_t>(length);
    push(v);
}

void Reader::push_little_endian(uint64_t length) {
    if (length > kMaxNumber) refuse("a number has " + std::to_string(length) + " bytes,");
    const char* data = take(length);
    Value v{.kind = Kind::kInt};
    if (length <= 8) {
        uint64_t bits = length && (data[length - 1] & 0x80) ? ~uint64_t{0} : 0;
        std::memcpy(&bits, data, length);
        v.integer = static_cast<int64_t>(bits);
    } else {
        v.kind = Kind::kBigInt;
        v.data = data;
        v.length = static_cast<uint32_t>(length);
    }
    push(v);
}

void Reader::push_decimal(std::string_view digits) {
    if (digits.size() > kMaxNumber) refuse("a number has " + std::to_string(digits.size()) + " digits,");
    Value v{.kind = Kind::kInt};
    const char* stop = digits.data() + digits.size();
    std::string_view plain = digits.starts_with('-') ? digits.substr(1) : digits;
    if (plain.empty() || plain.find_first_not_of("0123456789") != plain.npos)
        refuse("a number has other characters than digits,");
    if (std::from_chars(digits.data(), stop, v.integer).ec == std::errc::result_out_of_range) {
        v = {.kind = Kind::kBigInt, .decimal = true, .length = static_cast<uint32_t>(digits.size())};
        v.data = digits.data();
    }
    push(v);
}

// The number of a memo slot in protocol 0.
uint64_t Reader::number(std::string_view digits) const {
    uint64_t value = 0;
    const char* stop = digits.data() + digits.size();
    auto [end, code] = std::from_chars(digits.data(), stop, value);
    if (digits.empty() || end != stop || code != std::errc()) refuse("the number of a memo place is broken,");
    return value;
}

size_t Reader::need(size_t n) const {
    if (stack_.size() < floor() + n) refuse("an opcode needs more items than there are,");
    return stack_.size() - n;
}

size_t Reader::pop_mark() {
    if (marks_.empty()) refuse("an opcode needs a mark where there is none,");
    size_t at = marks_.back();
    marks_.pop_back();
    return at;
}

void Reader::extend(const Value& container, size_t from) {
    auto count = static_cast<uint32_t>(stack_.size() - from);
    if (!count) return;
    auto chunk = static_cast<uint32_t>(chunks_.size());
    chunks_.push_back({static_cast<uint32_t>(items_.size()), count, Container::kNoChunk});
    items_.insert(items_.end(), stack_.begin() + static_cast<ptrdiff_t>(from), stack_.end());
    stack_.resize(from);
    Container& c = containers[container.index];
    if (c.last == Container::kNoChunk) {
        c.first = chunk;
    } else {
        chunks_[c.last].next = chunk;
    }
    c.last = chunk;
}

void Reader::push_new(Kind kind, size_t from) {
    Value v{.kind = kind};
    v.index = containers.size();
    containers.emplace_back();
    extend(v, from);
    push(v);
}

// Appends the items above `from` to the container directly below them.
void Reader::add_to(Kind kind, size_t from) {
    if (from < floor() + 1) refuse("an opcode needs a container where there is none,");
    const Value target = stack_[from - 1];
    if (target.kind != kind) refuse(std::string("items are added to ") + name_of(target.kind) + ",");
    if (kind == Kind::kDict && (stack_.size() - from) % 2) refuse("a dict's last key has no value,");
    extend(target, from);
}

void Reader::put(uint64_t at) {
    need(1);
    // Each slot takes an opcode, so a valid pickle has no slot number above its size.
    if (at >= static_cast<uint64_t>(end_ - begin_)) refuse("the number of a memo place is out of range,");
    if (at >= memo_.size()) memo_.resize(at + 1, kFree);
    if (is_free(memo_[at])) ++memoized_;
    memo_[at] = stack_.back();
}

void Reader::get(uint64_t at) {
    if (at >= memo_.size() || is_free(memo_[at])) refuse("memo place " + std::to_string(at) + " is empty,");
    push(memo_[at]);
}

Value Reader::parse(std::string_view data) {
    begin_ = at_ = opcode_ = data.data();
    end_ = begin_ + data.size();
    memoized_ = 0;
    if (data.empty()) throw Refused("the input is empty");
    if (data.size() > kMaxInput) throw Refused("the input is larger than 2 GiB");
    for (;;) {
        if (at_ == end_) {
            opcode_ = at_;
            refuse("the pickle is cut short: it has no end");
        }
        opcode_ = at_;
        auto code = static_cast<uint8_t>(*at_++);
        switch (code) {
            case kProto:
                if (auto version = little<uint8_t>(); version > 5)
                    refuse("pickle protocol " + std::to_string(version) + " is not known here (0 to 5 are),");
                break;
            case kFrame:
                if (little<uint64_t>() > static_cast<uint64_t>(end_ - at_))
                    refuse("the pickle is cut short: a frame ends after the input,");
                break;
            case kStop: {
                if (!marks_.empty() || stack_.size() != 1) refuse("the pickle ends in the middle of a value");
                return stack_.back();
            }
            case kMark:
                marks_.push_back(static_cast<uint32_t>(stack_.size()));
                break;
            case kNone:
                push({});
                break;
            case kNewTrue:
            case kNewFalse: {
                Value v{.kind = Kind::kBool};
                v.integer = code == kNewTrue;
                push(v);
                break;
            }
            case kInt: {
                std::string_view text = line();
                if (text == "00" || text == "01") {
                    Value v{.kind = Kind::kBool};
                    v.integer = text == "01";
                    push(v);
                } else {
                    push_decimal(text);
                }
                break;
            }
            case kLong: {
                std::string_view text = line();
                if (text.ends_with('L')) text.remove_suffix(1);
                push_decimal(text);
                break;
            }
            case kBinInt:
            case kBinInt1:
            case kBinInt2: {
                Value v{.kind = Kind::kInt};
                v.integer = code == kBinInt    ? little<int32_t>()
                            : code == kBinInt1 ? little<uint8_t>()
                                               : little<uint16_t>();
                push(v);
                break;
            }
            case kLong1:
                push_little_endian(little<uint8_t>());
                break;
            case kLong4: {
                auto length = little<int32_t>();
                if (length < 0) refuse("a number has a negative length,");
                push_little_endian(static_cast<uint64_t>(length));
                break;
            }
            case kFloat: {
                std::string_view text = line();
                Value v{.kind = Kind::kFloat};
                const char* stop = text.data() + text.size();
                auto [end, error] = std::from_chars(text.data(), stop, v.real);
                if (text.empty() || end != stop || error != std::errc()) refuse("a float is broken,");
                push(v);
                break;
            }
            case kBinFloat: {
                Value v{.kind = Kind::kFloat};
                v.real = std::bit_cast<double>(__builtin_bswap64(little<uint64_t>()));
                push(v);
                break;
            }
            case kUnicode:
                push_escaped(line());
                break;
            case kShortBinUnicode:
                push_text(little<uint8_t>());
                break;
            case kBinUnicode:
                push_text(little<uint32_t>());
                break;
            case kBinUnicode8:
                push_text(little<uint64_t>());
                break;
            case kShortBinBytes:
                push_bytes(little<uint8_t>());
                break;
            case kBinBytes:
                push_bytes(little<uint32_t>());
                break;
            case kBinBytes8:
                push_bytes(little<uint64_t>());
                break;
            case kEmptyList:
                push_new(Kind::kList, stack_.size());
                break;
            case kEmptyTuple:
                push_new(Kind::kTuple, stack_.size());
                break;
            case kEmptyDict:
                push_new(Kind::kDict, stack_.size());
                break;
            case kList:
                push_new(Kind::kList, pop_mark());
                break;
            case kTuple:
                push_new(Kind::kTuple, pop_mark());
                break;
            case kDict: {
                size_t from = pop_mark();
                if ((stack_.size() - from) % 2) refuse("a dict's last key has no value,");
                push_new(Kind::kDict, from);
                break;
            }
            case kTuple1:
            case kTuple2:
            case kTuple3:
                push_new(Kind::kTuple, need(code - kTuple1 + 1u));
                break;
            case kAppend:
                add_to(Kind::kList, need(1));
                break;
            case kSetItem:
                add_to(Kind::kDict, need(2));
                break;
            case kAppends:
                add_to(Kind::kList, pop_mark());
                break;
            case kSetItems:
                add_to(Kind::kDict, pop_mark());
                break;
            case kPut:
                put(number(line()));
                break;
            case kBinPut:
                put(little<uint8_t>());
                break;
            case kLongBinPut:
                put(little<uint32_t>());
                break;
            case kMemoize:
                put(memoized_);
                break;
            case kGet:
                get(number(line()));
                break;
            case kBinGet:
                get(little<uint8_t>());
                break;
            case kLongBinGet:
                get(little<uint32_t>());
                break;
            default: {
                const char* name = opcode_name(code);
                char hex[8];
                std::snprintf(hex, sizeof hex, "0x%02x", code);
                if (!name) refuse(std::string("no pickle: ") + hex + " is no opcode,");
                refuse(std::string("opcode ") + name + " (" + hex + ") is refused: only plain data is read,");
            }
        }
    }
}

}  // namespace unicomm::pickle
