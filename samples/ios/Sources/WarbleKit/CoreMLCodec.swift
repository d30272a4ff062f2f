#if canImport(CoreML)
import CoreML
import Foundation

/// Codes to samples through post_module and vocoder on the Neural Engine, the GPU or the CPU, as
/// Core ML decides. Not compiled by this project: see README.md.
@available(iOS 18, macOS 15, *)
public final class CoreMLCodec {
    private let post, vocoder: [String: MLModel]
    private let state: MLState
    private let context: Int
    private var history: [[Float16]]
    private var position = 0

    /// `post` and `vocoder` are the URLs of the compiled packages (`MLModel.compileModel(at:)`).
    public init(post postURL: URL, vocoder vocoderURL: URL, units: MLComputeUnits = .all) throws {
        func load(_ url: URL, _ function: String) throws -> MLModel {
            let configuration = MLModelConfiguration()
            configuration.functionName = function
            configuration.computeUnits = units
            return try MLModel(contentsOf: url, configuration: configuration)
        }
        var (posts, vocoders): ([String: MLModel], [String: MLModel]) = ([:], [:])
        for name in ["first", "stream"] {
            posts[name] = try load(postURL, name)
            vocoders[name] = try load(vocoderURL, name)
        }
        (post, vocoder) = (posts, vocoders)
        state = posts["stream"]!.makeState()
        let shape = vocoders["first"]!.modelDescription
            .inputDescriptionsByName["latents"]!.multiArrayConstraint!.shape.map(\.intValue)
        context = shape[2] - 1
        history = Array(repeating: Array(repeating: 0, count: context), count: shape[1])
    }

    /// Samples of the next frames: one the first time, then seven; codes by codebook.
    public func samples(of codes: [[Int32]]) throws -> [Float] {
        let name = position == 0 ? "first" : "stream"
        let frames = codes[0].count
        let input = try array(codes.flatMap { $0 }, [1, codes.count, frames], .int32)
        let at = try array([Int32(position)], [1], .int32)
        let known = try array([Int32(min(position, context))], [1], .int32)
        let made = try post[name]!.prediction(
            from: try MLDictionaryFeatureProvider(dictionary: ["codes": input, "position": at]),
            using: state)
        let latents = MLShapedArray<Float16>(made.featureValue(for: "latents")!.multiArrayValue!)
        for channel in history.indices {
            history[channel] += latents[0][channel].scalars
        }
        let window = MLShapedArray<Float16>(
            scalars: history.flatMap { $0 }, shape: [1, history.count, context + frames])
        let spoken = try vocoder[name]!.prediction(
            from: try MLDictionaryFeatureProvider(
                dictionary: ["latents": MLMultiArray(window), "hist": known]))
        for channel in history.indices { history[channel].removeFirst(frames) }
        position += frames
        let wave = MLShapedArray<Float16>(spoken.featureValue(for: "samples")!.multiArrayValue!)
        return wave.scalars.map(Float.init)
    }

    private func array(_ values: [Int32], _ shape: [Int], _ type: MLMultiArrayDataType) throws
        -> MLMultiArray
    {
        let made = try MLMultiArray(shape: shape.map { NSNumber(value: $0) }, dataType: type)
        for (index, value) in values.enumerated() { made[index] = NSNumber(value: value) }
        return made
    }
}
#endif
