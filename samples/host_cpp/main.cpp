// Speaks with the MLX functions of an exported folder, without Python and without model code.
//
//   warble_host FOLDER OUT.wav [--text TEXT] [--voice NAME] [--seed N] [--frames N] [--greedy]
//               [--codes FILE]
//
// Without --text the sentence of the folder's self-test is said. --text needs a model whose text is
// tokenised byte by byte (the bundled one); for others tokenise in your app and see README.md.
#include <iostream>
#include <map>

#include "speaker.hpp"
#include "wav.hpp"

namespace {

void append(Columns& columns, const std::vector<int>& ids) {
    for (int id : ids) {
        columns[0].push_back(id);
        for (std::size_t row = 1; row < columns.size(); row++) columns[row].push_back(0);
    }
}

void append(Columns& columns, const mx::array& block) {
    const auto rows = columns.size(), length = static_cast<std::size_t>(block.shape(1));
    const int* values = block.data<int>();
    for (std::size_t row = 0; row < rows; row++)
        columns[row].insert(columns[row].end(), values + row * length, values + (row + 1) * length);
}

mx::array load(const std::filesystem::path& file, const std::string& name) {
    auto tensors = mx::load_safetensors(file.string()).first;
    auto found = tensors.find(name);
    if (found == tensors.end()) throw std::runtime_error(file.string() + " has no " + name);
    mx::array array = mx::contiguous(found->second);
    mx::eval(array);
    return array;
}

const json::Value& voice_named(const json::Value& manifest, const std::string& name) {
    for (const auto& voice : manifest["voices"].items)
        if (voice["name"].text == name || (name.empty() && voice["default"].truth)) return voice;
    throw std::runtime_error("no voice " + (name.empty() ? "is the default" : name));
}

Columns prompt_for(const json::Value& manifest, const std::filesystem::path& folder,
                   const std::string& text, const std::string& voice_name) {
    const auto& tokens = manifest["tokens"];
    const auto bytes = tokens["byte_ids"].integers();
    if (bytes.empty())
        throw std::runtime_error("this model's tokenizer merges: tokenise in your app");
    const auto& voice = voice_named(manifest, voice_name);
    Columns columns(static_cast<std::size_t>(tokens["codebooks"].integer()) + 1);
    if (voice["file"].text.empty()) {
        for (const char* piece : {"system", "plain", "end", "user"})
            append(columns, tokens[piece].integers());
        append(columns, voice["token_ids"].integers());
    } else {
        append(columns, load(folder / voice["file"].text, "columns"));
    }
    std::vector<int> ids;
    for (unsigned char byte : text) ids.push_back(bytes[byte]);
    append(columns, ids);
    append(columns, tokens["end"].integers());
    append(columns, tokens["assistant"].integers());
    return columns;
}

std::map<std::string, std::string> options(int count, char** values) {
    std::map<std::string, std::string> found;
    for (int i = 3; i < count; i++) {
        const std::string name = values[i];
        if (name == "--greedy") {
            found[name] = "1";
        } else if (i + 1 < count && (name == "--text" || name == "--voice" || name == "--seed" ||
                                     name == "--frames" || name == "--codes")) {
            found[name] = values[++i];
        } else {
            throw std::runtime_error("unknown or incomplete option " + name);
        }
    }
    return found;
}

int speak(int count, char** values) {
    if (count < 3)
        throw std::runtime_error(
            "usage: warble_host FOLDER OUT.wav [--text TEXT] [--voice NAME] [--seed N] [--frames N]"
            " [--greedy] [--codes FILE]");
    const std::filesystem::path folder = values[1];
    auto given = options(count, values);
    if (given.count("--text") && given["--text"].empty())
        throw std::runtime_error("the text is empty");
    if (given.count("--voice") && !given.count("--text"))
        throw std::runtime_error("--voice needs --text: the self-test's sentence has its own");
    Speaker speaker(folder);
    const auto& manifest = speaker.manifest;
    const auto& defaults = manifest["sampling"];
    Settings settings{defaults["top_k"].integer(), static_cast<float>(defaults["top_p"].number),
                      static_cast<float>(defaults["temperature"].number)};
    if (given.count("--greedy")) settings.top_k = 1, settings.temperature = 1.0f;
    const int most = given.count("--frames") ? std::stoi(given["--frames"]) : 300;
    const auto seed = static_cast<unsigned>(given.count("--seed") ? std::stoul(given["--seed"]) : 7);

    Columns columns(11);
    if (given.count("--text"))
        columns = prompt_for(manifest, folder, given["--text"], given["--voice"]);
    else
        append(columns, load(folder / "mlxfn/selftest.safetensors", "columns"));

    const auto codes = speaker.generate(columns, most, seed, settings);
    const auto samples = speaker.decode(codes);
    const int rate = manifest["audio"]["sample_rate"].integer();
    write_wav(values[2], samples, rate);
    if (given.count("--codes")) {
        std::ofstream file(given["--codes"]);
        for (const auto& frame : codes) {
            for (std::size_t i = 0; i < frame.size(); i++) file << (i ? " " : "") << frame[i];
            file << "\n";
        }
    }
    std::cout << codes.size() << " frames, " << static_cast<double>(samples.size()) / rate << " s\n";
    return 0;
}

}  // namespace

int main(int count, char** values) {
    try {
        return speak(count, values);
    } catch (const std::exception& error) {
        std::cerr << "warble_host: " << error.what() << "\n";
        if (std::string(error.what()).find("gpu backend") != std::string::npos)
            std::cerr << "This folder was exported for a GPU: export it with --device cpu\n";
        return 2;
    }
}
