#if canImport(MLX)
import Foundation
import MLX
import MLXRandom

/// Speaks through lm.mlxfn and codec.mlxfn. Not compiled by this project: see README.md.
///
/// Call it from one thread that is not the main one. Before iOS 26 a process that gives work to the
/// GPU in the background is ended by the system, hence the gate.
public final class MLXSpeaker {
    public let manifest: Manifest
    private let model, codec: ImportedFunction
    private let functions: [String: Manifest.Function]

    public init(folder: URL) throws {
        manifest = try Manifest(folder: folder)
        let damaged = manifest.damagedFiles(in: folder)
        guard damaged.isEmpty else { throw WarbleError.damaged(damaged) }
        MLX.Memory.cacheLimit = 32 << 20
        model = try importFunction(from: folder.appendingPathComponent("mlxfn/lm.mlxfn"))
        codec = try importFunction(from: folder.appendingPathComponent("mlxfn/codec.mlxfn"))
        let all = try manifest.part("mlxfn").functions
        functions = Dictionary(uniqueKeysWithValues: all.map { ($0.name, $0) })
    }

    /// Samples of `text`, chunk by chunk; return false from `chunk` to stop.
    ///
    /// `gate` is passed before every piece of work for the GPU: closed, it holds the speech up until
    /// the app is in front again.
    public func say(
        _ text: String, voice name: String? = nil, seed: UInt32 = 7, maxFrames: Int? = nil,
        gate: ForegroundGate, chunk: ([Float]) -> Bool
    ) throws {
        let prompt = PromptBuilder(manifest.tokens)
        let ids = try prompt.ids(of: PromptBuilder.folded(text))
        let (rows, padding) = prompt.padded(prompt.rows(text: ids, voice: try manifest.voice(name)))
        let most = maxFrames ?? manifest.sampling.maxFrames
        let (slots, step) = try frameFunction(positions: rows[0].count + most + 1)
        var caches = zeros(step)
        let hole = MLXArray([Int32(0), Int32(padding)], [1, 2])
        var hidden = MLXArray.zeros([1])
        var at = 0
        for size in ChunkScheduler.prefill(rows[0].count, sizes: prefillSizes(slots)) {
            let part = rows.flatMap { $0[at..<at + size] }
            let given = [MLXArray(part, [1, rows.count, size]), MLXArray([Int32(at)]), hole]
            try gate.pass()
            let result = try model(given + caches)
            eval(result)
            hidden = result[0]
            caches = Array(result[1...])
            at += size
        }
        try frames(step, hidden, hole, at, caches, most, seed, gate, chunk)
    }

    private func frames(
        _ step: Manifest.Function, _ start: MLXArray, _ hole: MLXArray, _ at: Int,
        _ first: [MLXArray], _ most: Int, _ seed: UInt32, _ gate: ForegroundGate,
        _ chunk: ([Float]) -> Bool
    ) throws {
        var (hidden, caches) = (start, first)
        var slot = MLXArray([Int32(at)])
        var recent = MLXArray(
            Array(repeating: UInt32.max, count: step.inputs[3].shape[1]), step.inputs[3].shape)
        var frame = MLXArray([Int32(0)])
        let s = manifest.sampling
        let settings = [MLXArray([Int32(s.topK)]), MLXArray([s.topP]), MLXArray([s.temperature])]
        let (semantic, books) = (step.inputs[8].shape, step.inputs[9].shape)
        let count = semantic.reduce(1, *)
        var codes: [[Int32]] = []
        var scheduler = ChunkScheduler()
        guard let codecFirst = functions["codec_first"] else {
            throw WarbleError.missing("codec_first")
        }
        var state = zeros(codecFirst)

        func flush(ended: Bool) throws -> Bool {
            while let next = scheduler.next(known: codes.count, ended: ended) {
                var part: [Int32] = []
                for book in 0..<manifest.tokens.codebooks {
                    for i in 0..<next.size { part.append(i < next.frames ? codes[next.begin + i][book] : 0) }
                }
                let input = MLXArray(part, [1, manifest.tokens.codebooks, next.size])
                try gate.pass()
                let result = try codec([input] + state)
                eval(result)
                state = Array(result[1...])
                let samples = result[0].asArray(Float.self)
                let used = next.frames * manifest.audio.samplesPerFrame
                if !chunk(Array(samples[0..<used])) { return false }
            }
            return true
        }

        for number in 0..<most {
            let drawn = MLXRandom.uniform(
                0..<1, [count + books.reduce(1, *)], key: MLXArray([seed, UInt32(number)]))
            let noise = [drawn[0..<count].reshaped(semantic), drawn[count...].reshaped(books)]
            try gate.pass()
            let result = try model([hidden, slot, hole, recent, frame] + settings + noise + caches)
            eval(result)
            let emitted = result[0].asArray(UInt32.self)
            if emitted[0] == UInt32(manifest.tokens.codebookSize) { break }
            codes.append(emitted[1...].map { Int32($0) })
            (hidden, slot, recent, frame) = (result[1], result[2], result[3], result[4])
            caches = Array(result[5...])
            if try !flush(ended: false) { return }
        }
        _ = try flush(ended: true)
    }

    private func zeros(_ function: Manifest.Function) -> [MLXArray] {
        function.states.flatMap(\.tensors).map { tensor in
            switch tensor.dtype {
            case "bfloat16": return MLXArray.zeros(tensor.shape, dtype: .bfloat16)
            case "float16": return MLXArray.zeros(tensor.shape, dtype: .float16)
            case "int32": return MLXArray.zeros(tensor.shape, dtype: .int32)
            default: return MLXArray.zeros(tensor.shape, dtype: .float32)
            }
        }
    }

    private func frameFunction(positions: Int) throws -> (Int, Manifest.Function) {
        let all = functions.values.compactMap { f -> (Int, Manifest.Function)? in
            guard f.name.hasPrefix("frame_"), let n = Int(f.name.dropFirst(6)) else { return nil }
            return (n, f)
        }.sorted { $0.0 < $1.0 }
        guard let found = all.first(where: { $0.0 >= positions }) else {
            throw WarbleError.tooLong(wanted: positions, longest: all.last?.0 ?? 0)
        }
        return found
    }

    private func prefillSizes(_ slots: Int) -> [Int] {
        functions.keys.compactMap { name in
            let parts = name.split(separator: "_")
            guard parts.count == 3, parts[0] == "prefill", Int(parts[2]) == slots else { return nil }
            return Int(parts[1])
        }
    }
}
#endif
