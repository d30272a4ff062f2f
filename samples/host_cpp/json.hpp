// The JSON that manifest.json is made of, read into a tree. No writing, no surrogate pairs.
#pragma once

#include <cctype>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace json {

struct Value {
    enum class Kind { null, boolean, number, text, list, object } kind = Kind::null;
    bool truth = false;
    double number = 0;
    std::string text;
    std::vector<Value> items;
    std::map<std::string, Value> fields;

    const Value& operator[](const std::string& name) const {
        auto found = fields.find(name);
        if (found == fields.end()) throw std::runtime_error("manifest.json lacks " + name);
        return found->second;
    }
    int integer() const { return static_cast<int>(number); }
    std::vector<int> integers() const {
        std::vector<int> all;
        for (const auto& item : items) all.push_back(item.integer());
        return all;
    }
};

class Reader {
public:
    explicit Reader(const std::string& source) : source_(source) {}

    Value read() {
        Value value = any();
        space();
        if (at_ != source_.size()) fail("text behind the end");
        return value;
    }

private:
    const std::string& source_;
    std::size_t at_ = 0;

    [[noreturn]] void fail(const std::string& what) const {
        throw std::runtime_error("JSON: " + what + " at byte " + std::to_string(at_));
    }
    void space() {
        while (at_ < source_.size() && std::isspace(static_cast<unsigned char>(source_[at_]))) at_++;
    }
    char peek() {
        space();
        if (at_ >= source_.size()) fail("unexpected end");
        return source_[at_];
    }
    void expect(char wanted) {
        if (peek() != wanted) fail(std::string("expected ") + wanted);
        at_++;
    }
    bool word(const std::string& wanted) {
        if (source_.compare(at_, wanted.size(), wanted) != 0) return false;
        at_ += wanted.size();
        return true;
    }

    Value any() {
        Value value;
        switch (peek()) {
            case '{': return object();
            case '[': return list();
            case '"':
                value.kind = Value::Kind::text;
                value.text = string();
                return value;
            default: break;
        }
        if (word("true") || word("false")) {
            value.kind = Value::Kind::boolean;
            value.truth = source_[at_ - 2] == 'u';
            return value;
        }
        if (word("null")) return value;
        std::size_t used = 0;
        value.kind = Value::Kind::number;
        try {
            value.number = std::stod(source_.substr(at_, 40), &used);
        } catch (const std::exception&) {
            fail("no value");
        }
        at_ += used;
        return value;
    }

    Value list() {
        Value value;
        value.kind = Value::Kind::list;
        expect('[');
        if (peek() == ']') return at_++, value;
        do {
            value.items.push_back(any());
        } while (peek() == ',' && at_++ < source_.size());
        expect(']');
        return value;
    }

    Value object() {
        Value value;
        value.kind = Value::Kind::object;
        expect('{');
        if (peek() == '}') return at_++, value;
        do {
            peek();
            std::string name = string();
            expect(':');
            value.fields[name] = any();
        } while (peek() == ',' && at_++ < source_.size());
        expect('}');
        return value;
    }

    std::string string() {
        expect('"');
        std::string text;
        while (at_ < source_.size() && source_[at_] != '"') {
            char next = source_[at_++];
            if (next != '\\') {
                text += next;
                continue;
            }
            char escaped = at_ < source_.size() ? source_[at_++] : '\0';
            switch (escaped) {
                case 'n': text += '\n'; break;
                case 't': text += '\t'; break;
                case 'r': text += '\r'; break;
                case 'b': text += '\b'; break;
                case 'f': text += '\f'; break;
                case 'u': append(text, code_unit()); break;
                default: text += escaped;
            }
        }
        if (at_ >= source_.size()) fail("open string");
        at_++;
        return text;
    }

    unsigned code_unit() {
        if (at_ + 4 > source_.size()) fail("short escape");
        unsigned unit = static_cast<unsigned>(std::stoul(source_.substr(at_, 4), nullptr, 16));
        at_ += 4;
        return unit;
    }

    static void append(std::string& text, unsigned unit) {
        if (unit < 0x80) {
            text += static_cast<char>(unit);
        } else if (unit < 0x800) {
            text += static_cast<char>(0xC0 | unit >> 6);
            text += static_cast<char>(0x80 | (unit & 0x3F));
        } else {
            text += static_cast<char>(0xE0 | unit >> 12);
            text += static_cast<char>(0x80 | (unit >> 6 & 0x3F));
            text += static_cast<char>(0x80 | (unit & 0x3F));
        }
    }
};

}  // namespace json
