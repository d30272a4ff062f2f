// Runs the exported functions: pad, prefill in chunks, frame by frame, codec in chunks.
#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "json.hpp"
#include "mlx/export.h"
#include "mlx/mlx.h"

namespace mx = mlx::core;

using Columns = std::vector<std::vector<int>>;  // eleven rows of one length

struct Settings {
    int top_k;
    float top_p;
    float temperature;
};

inline json::Value read_manifest(const std::filesystem::path& folder) {
    std::ifstream file(folder / "manifest.json", std::ios::binary);
    if (!file) throw std::runtime_error((folder / "manifest.json").string() + " cannot be read");
    const std::string source((std::istreambuf_iterator<char>(file)), {});
    json::Value manifest = json::Reader(source).read();
    if (manifest["schema"].text != "warble-ios/1")
        throw std::runtime_error("this program reads warble-ios/1, not " + manifest["schema"].text);
    return manifest;
}

inline mx::Dtype dtype_of(const std::string& name) {
    if (name == "bfloat16") return mx::bfloat16;
    if (name == "float16") return mx::float16;
    if (name == "float32") return mx::float32;
    if (name == "int32") return mx::int32;
    throw std::runtime_error("unknown dtype " + name);
}

// Zeros for every tensor of a function's states.
inline std::vector<mx::array> empty_states(const json::Value& function) {
    std::vector<mx::array> all;
    for (const auto& state : function["states"].items)
        for (const auto& tensor : state["tensors"].items) {
            const auto shape = tensor["shape"].integers();
            all.push_back(mx::zeros(mx::Shape(shape.begin(), shape.end()),
                                    dtype_of(tensor["dtype"].text)));
        }
    return all;
}

class Speaker {
public:
    explicit Speaker(const std::filesystem::path& folder)
        : manifest(read_manifest(folder)),
          model_(mx::import_function((folder / "mlxfn/lm.mlxfn").string())),
          codec_(mx::import_function((folder / "mlxfn/codec.mlxfn").string())) {
        for (const auto& part : manifest["parts"].items)
            if (part["name"].text == "mlxfn") functions_ = part["functions"].items;
        if (functions_.empty()) throw std::runtime_error("the folder holds no part mlxfn");
    }

    // Frames for a prompt: rows of ten codes, up to EOS or `most`.
    std::vector<std::vector<int>> generate(const Columns& columns, int most, unsigned seed,
                                           const Settings& settings) {
        const auto& tokens = manifest["tokens"];
        const int length = static_cast<int>(columns[0].size());
        const int padding = (32 - length % 32) % 32, padded = length + padding;
        const json::Value& step = frame_function(padded + most + 1);
        auto caches = empty_states(step);
        const int slots = caches[0].shape(3);
        const mx::array hole({0, padding}, {1, 2}, mx::int32);

        mx::array hidden = mx::zeros({1});
        int at = 0;
        for (int size : chunks(padded, slots)) {
            std::vector<int> part;
            for (std::size_t row = 0; row < columns.size(); row++)
                for (int i = at; i < at + size; i++)
                    part.push_back(i >= padding ? columns[row][static_cast<std::size_t>(i - padding)]
                                                : (row == 0 ? tokens["pad"].integer() : 0));
            mx::Args given{
                mx::array(part.begin(), {1, static_cast<int>(columns.size()), size}, mx::int32),
                mx::array({at}, mx::int32), hole};
            given.insert(given.end(), caches.begin(), caches.end());
            caches.clear();
            auto result = run(model_, std::move(given));
            hidden = result[0];
            caches.assign(result.begin() + 1, result.end());
            at += size;
        }
        return frames(step, hidden, hole, at, std::move(caches), most, seed, settings);
    }

    // Samples in -1..1 of frames: a first short chunk, then long ones, the last filled up.
    std::vector<float> decode(const std::vector<std::vector<int>>& codes) {
        std::vector<float> samples;
        auto state = empty_states(function("codec_first"));
        const int per_frame = manifest["audio"]["samples_per_frame"].integer();
        for (std::size_t at = 0; at < codes.size();) {
            const auto& chunk = function(at == 0 ? "codec_first" : "codec_stream");
            const int size = chunk["inputs"].items[0]["shape"].integers()[2];
            const std::size_t used = std::min<std::size_t>(static_cast<std::size_t>(size), codes.size() - at);
            std::vector<int> part;
            for (std::size_t book = 0; book < codes[0].size(); book++)
                for (std::size_t i = 0; i < static_cast<std::size_t>(size); i++)
                    part.push_back(i < used ? codes[at + i][book] : 0);
            mx::Args given{
                mx::array(part.begin(), {1, static_cast<int>(codes[0].size()), size}, mx::int32)};
            given.insert(given.end(), state.begin(), state.end());
            state.clear();
            auto result = run(codec_, std::move(given));
            state.assign(result.begin() + 1, result.end());
            const float* wave = result[0].data<float>();
            samples.insert(samples.end(), wave, wave + used * static_cast<std::size_t>(per_frame));
            at += used;
        }
        return samples;
    }

    const json::Value manifest;

private:
    mx::ImportedFunction model_, codec_;
    std::vector<json::Value> functions_;

    static std::vector<mx::array> run(const mx::ImportedFunction& function, mx::Args given) {
        auto result = function(given);
        given.clear();  // so that caches can be written in place
        mx::eval(result);
        return result;
    }

    const json::Value& function(const std::string& name) const {
        for (const auto& f : functions_)
            if (f["name"].text == name) return f;
        throw std::runtime_error("the folder holds no function " + name);
    }

    // The frame function with the shortest caches that hold `wanted` positions.
    const json::Value& frame_function(int wanted) const {
        const json::Value* best = nullptr;
        int shortest = 0;
        for (const auto& f : functions_) {
            if (f["name"].text.rfind("frame_", 0) != 0) continue;
            const int slots = std::stoi(f["name"].text.substr(6));
            if (slots >= wanted && (best == nullptr || slots < shortest)) best = &f, shortest = slots;
        }
        if (best == nullptr) throw std::runtime_error("prompt and frames do not fit: shorten the text");
        return *best;
    }

    // Prefill lengths that add up to `length`, the longest first.
    std::vector<int> chunks(int length, int slots) const {
        std::vector<int> sizes, found;
        const std::string behind = "_" + std::to_string(slots);
        for (const auto& f : functions_) {
            const std::string& name = f["name"].text;
            if (name.rfind("prefill_", 0) == 0 && name.size() > behind.size() &&
                name.compare(name.size() - behind.size(), behind.size(), behind) == 0)
                sizes.push_back(std::stoi(name.substr(8)));
        }
        std::sort(sizes.begin(), sizes.end(), std::greater<>());
        for (int size : sizes)
            for (; length >= size; length -= size) found.push_back(size);
        return found;
    }

    std::vector<std::vector<int>> frames(const json::Value& step, mx::array hidden,
                                         const mx::array& hole, int at,
                                         std::vector<mx::array> caches, int most, unsigned seed,
                                         const Settings& settings) {
        const auto& inputs = step["inputs"].items;
        const int window = inputs[3]["shape"].integers()[1];
        const auto semantic = inputs[8]["shape"].integers(), books = inputs[9]["shape"].integers();
        const int first = semantic[0] * semantic[2], second = books[0] * books[2];
        mx::array slot({at}, mx::int32), frame = mx::zeros({1}, mx::int32);
        mx::array recent = mx::full({1, window}, 0xFFFFFFFFu, mx::uint32);
        const mx::array top_k({settings.top_k}, mx::int32), top_p({settings.top_p}, mx::float32),
            temperature({settings.temperature}, mx::float32);
        const unsigned eos = static_cast<unsigned>(manifest["tokens"]["codebook_size"].integer());

        std::vector<std::vector<int>> codes;
        for (int number = 0; number < most; number++) {
            // The runtime's noise: it follows from (seed, frame) alone.
            const mx::array key({seed, static_cast<unsigned>(number)}, {2}, mx::uint32);
            const auto drawn = mx::random::uniform(0.0f, 1.0f, {first + second}, mx::float32, key);
            mx::Args given{
                hidden, slot, hole, recent, frame, top_k, top_p, temperature,
                mx::reshape(mx::slice(drawn, {0}, {first}), {2, 1, semantic[2]}),
                mx::reshape(mx::slice(drawn, {first}, {first + second}), {books[0], 1, books[2]})};
            given.insert(given.end(), caches.begin(), caches.end());
            caches.clear();
            auto result = run(model_, std::move(given));
            const unsigned* emitted = result[0].data<unsigned>();
            if (emitted[0] == eos) break;
            codes.emplace_back(emitted + 1, emitted + 11);
            hidden = result[1], slot = result[2], recent = result[3], frame = result[4];
            caches.assign(result.begin() + 5, result.end());
        }
        return codes;
    }
};
