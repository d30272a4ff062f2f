// Mono 16-bit PCM to a WAV file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

inline void write_wav(const std::string& path, const std::vector<float>& samples, int rate) {
    std::ofstream file(path, std::ios::binary);
    auto number = [&](std::uint32_t value, int bytes) {
        for (int i = 0; i < bytes; i++) file.put(static_cast<char>(value >> (8 * i) & 0xFF));
    };
    const auto bytes = static_cast<std::uint32_t>(2 * samples.size());
    file << "RIFF";
    number(36 + bytes, 4);
    file << "WAVEfmt ";
    number(16, 4);
    number(1, 2);  // PCM
    number(1, 2);  // channels
    number(static_cast<std::uint32_t>(rate), 4);
    number(static_cast<std::uint32_t>(2 * rate), 4);
    number(2, 2);   // bytes per sample of all channels
    number(16, 2);  // bits
    file << "data";
    number(bytes, 4);
    for (float sample : samples) {
        const float scaled = std::round(std::clamp(sample, -1.0f, 1.0f) * 32767.0f);
        number(static_cast<std::uint16_t>(static_cast<std::int16_t>(scaled)), 2);
    }
    file.flush();
    if (!file) throw std::runtime_error(path + " cannot be written");
}
