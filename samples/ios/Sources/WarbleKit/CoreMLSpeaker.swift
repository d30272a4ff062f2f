#if canImport(CoreML)
import CoreML
import Foundation

/// Speaks through the packages of `coreml/` alone. Not compiled by this project: see README.md.
///
/// Core ML runs the transformers on the GPU or the CPU and the codec where it likes, so the gate is
/// passed before every call, as with MLX. Call it from one thread that is not the main one.
@available(iOS 18, macOS 15, *)
public final class CoreMLSpeaker {
    public let manifest: Manifest
    private let slow: [String: MLModel]
    private let fast: MLModel
    private let tables: EmbeddingTables
    private let codecURLs: (post: URL, vocoder: URL)
    private let slots: Int

    /// `compiled` holds the four packages compiled (`MLModel.compileModel(at:)`, or by Xcode), under
    /// their names with the ending `mlmodelc`; `folder` is the exported one.
    public init(folder: URL, compiled: URL) throws {
        manifest = try Manifest(folder: folder)
        let damaged = manifest.damagedFiles(in: folder)
        guard damaged.isEmpty else { throw WarbleError.damaged(damaged) }
        func url(_ name: String) -> URL { compiled.appendingPathComponent("\(name).mlmodelc") }
        func load(_ name: String, _ function: String? = nil) throws -> MLModel {
            let configuration = MLModelConfiguration()
            configuration.functionName = function
            configuration.computeUnits = .cpuAndGPU  // 4-bit blocks have no way to the Neural Engine
            return try MLModel(contentsOf: url(name), configuration: configuration)
        }
        let functions = try manifest.part("coreml").functions
            .filter { $0.file.hasSuffix("slow_ar.mlpackage") }
        guard let cache = functions.first?.states.first?.tensors.first else {
            throw WarbleError.missing("slow_ar")
        }
        slots = cache.shape[2]
        var found: [String: MLModel] = [:]
        for function in functions { found[function.name] = try load("slow_ar", function.name) }
        slow = found
        fast = try load("fast_ar")
        tables = try EmbeddingTables(
            file: folder.appendingPathComponent("coreml/embeddings.safetensors"),
            tokens: manifest.tokens)
        codecURLs = (url("post_module"), url("vocoder"))
    }

    /// Samples of `text`, chunk by chunk; return false from `chunk` to stop. `uniforms` gives so many
    /// numbers in [0, 1).
    public func say(
        _ text: String, voice name: String? = nil, maxFrames: Int? = nil, gate: ForegroundGate,
        uniforms: (Int) -> [Float] = { count in (0..<count).map { _ in Float.random(in: 0..<1) } },
        chunk: ([Float]) -> Bool
    ) throws {
        let prompt = PromptBuilder(manifest.tokens)
        let ids = try prompt.ids(of: PromptBuilder.folded(text))
        let (rows, padding) = prompt.padded(prompt.rows(text: ids, voice: try manifest.voice(name)))
        let most = maxFrames ?? manifest.sampling.maxFrames
        let (length, t) = (rows[0].count, manifest.tokens)
        guard length + most + 1 <= slots else {
            throw WarbleError.tooLong(wanted: length + most + 1, longest: slots)
        }
        guard let step = slow["step"] else { throw WarbleError.missing("step") }
        let state = step.makeState()
        var at = 0
        var last: MLFeatureProvider?
        let sizes = slow.keys.compactMap { Int($0.dropFirst("prefill_".count)) }
        for size in ChunkScheduler.prefill(length, sizes: sizes) {
            guard let prefill = slow["prefill_\(size)"] else { throw WarbleError.missing("prefill") }
            let columns = (at..<at + size).map { i in rows.map { $0[i] } }
            try gate.pass()
            last = try advance(prefill, columns, at, padding, state)
            at += size
        }
        var sampler = SemanticSampler(manifest.sampling)
        var (codes, scheduler): ([[Int32]], ChunkScheduler) = ([], ChunkScheduler())
        let codec = try CoreMLCodec(post: codecURLs.post, vocoder: codecURLs.vocoder)

        func flush(ended: Bool) throws -> Bool {
            while let next = scheduler.next(known: codes.count, ended: ended) {
                let part = (0..<t.codebooks).map { book in
                    (0..<next.size).map { $0 < next.frames ? codes[next.begin + $0][book] : 0 }
                }
                try gate.pass()
                let samples = try codec.samples(of: part)
                let used = next.frames * manifest.audio.samplesPerFrame
                if !chunk(Array(samples[0..<used])) { return false }
            }
            return true
        }

        for _ in 0..<most {
            guard let scores = last?.featureValue(for: "logits")?.multiArrayValue,
                let hidden = last?.featureValue(for: "hidden")?.multiArrayValue
            else { throw WarbleError.missing("logits") }
            let semantic = sampler.choose(
                MLShapedArray<Float16>(scores).scalars.map(Float.init),
                uniforms: [uniforms(scores.count), uniforms(scores.count)])
            if semantic == t.codebookSize { break }
            try gate.pass()
            codes.append(try frame(hidden, Int32(semantic), uniforms))
            if try !flush(ended: false) { return }
            try gate.pass()
            last = try advance(
                step, [[Int32(t.semanticBegin + semantic)] + codes[codes.count - 1]], at, padding,
                state)
            at += 1
        }
        _ = try flush(ended: true)
    }

    /// Columns from slot `at` on through the slow AR.
    private func advance(
        _ model: MLModel, _ columns: [[Int32]], _ at: Int, _ padding: Int, _ state: MLState
    ) throws -> MLFeatureProvider {
        let scalars = columns.flatMap { tables.row($0).map(Float16.init) }
        let embedded = MLShapedArray<Float16>(
            scalars: scalars, shape: [1, columns.count, tables.width])
        let slot = MLShapedArray<Int32>(scalars: [Int32(at)], shape: [1])
        let hole = MLShapedArray<Int32>(scalars: [0, Int32(padding)], shape: [2])
        let input = try MLDictionaryFeatureProvider(dictionary: [
            "embedded": MLMultiArray(embedded), "slot": MLMultiArray(slot),
            "hole": MLMultiArray(hole),
        ])
        return try model.prediction(from: input, using: state)
    }

    /// The ten codes of a frame, the semantic one first.
    private func frame(_ hidden: MLMultiArray, _ semantic: Int32, _ uniforms: (Int) -> [Float])
        throws -> [Int32]
    {
        let (s, t) = (manifest.sampling, manifest.tokens)
        let noise = uniforms((t.codebooks - 1) * t.codebookSize).map { -log(-log($0)) }
        let input = try MLDictionaryFeatureProvider(dictionary: [
            "hidden": hidden,
            "code": MLMultiArray(MLShapedArray<Int32>(scalars: [semantic], shape: [1])),
            "noise": MLMultiArray(
                MLShapedArray<Float>(scalars: noise, shape: [t.codebooks - 1, t.codebookSize])),
            "top_k": MLMultiArray(MLShapedArray<Int32>(scalars: [Int32(s.topK)], shape: [1])),
            "top_p": MLMultiArray(MLShapedArray<Float>(scalars: [s.topP], shape: [1])),
            "temperature": MLMultiArray(MLShapedArray<Float>(scalars: [s.temperature], shape: [1])),
        ])
        let made = try fast.prediction(from: input)
        guard let codes = made.featureValue(for: "codes")?.multiArrayValue else {
            throw WarbleError.missing("codes")
        }
        return MLShapedArray<Int32>(codes).scalars
    }
}
#endif
