import Foundation

/// How a token is chosen, for ports that sample themselves (the exported functions do it inside).
///
/// In this order: softmax of the untempered scores, cumulated from the best; rank 0 stays, and ranks
/// below `topK` whose sum including themselves is at most `topP`; then the temperature; then the
/// largest of score - log(-log(uniform)). An entry whose uniform is 0 never wins.
public struct Sampler: Sendable {
    public var topK: Int
    public var topP, temperature: Float
    public var minTemperature: Float = 1e-5

    public init(topK: Int, topP: Float, temperature: Float) {
        self.topK = topK
        self.topP = topP
        self.temperature = temperature
    }

    public init(_ defaults: Manifest.Sampling) {
        self.init(topK: defaults.topK, topP: defaults.topP, temperature: defaults.temperature)
        minTemperature = defaults.minTemperature
    }

    /// Indices that may be chosen, the best first. Equal scores keep the order of their indices.
    public func kept(_ scores: [Float]) -> [Int] {
        let order = scores.indices.sorted {
            scores[$0] != scores[$1] ? scores[$0] > scores[$1] : $0 < $1
        }
        let best = scores[order[0]]
        let total = order.reduce(Float(0)) { $0 + exp(scores[$1] - best) }
        var mass: Float = 0
        var found: [Int] = []
        for (rank, index) in order.enumerated() {
            mass += exp(scores[index] - best)
            if rank == 0 || (rank < topK && mass / total <= topP) { found.append(index) }
        }
        return found
    }

    public func choose(_ scores: [Float], uniforms: [Float]) -> Int {
        let heat = max(temperature, minTemperature)
        func race(_ index: Int) -> Float { scores[index] / heat - log(-log(uniforms[index])) }
        let candidates = kept(scores)
        // `max(by:)` gives the last of equals; the first is wanted.
        var winner = candidates[0]
        for index in candidates.dropFirst() where race(index) > race(winner) { winner = index }
        return winner
    }
}

/// The semantic token: a second draw replaces one that was emitted lately. EOS is never replaced.
public struct SemanticSampler: Sendable {
    public let regular, rescue: Sampler
    public private(set) var recent: [Int]
    private var frame = 0

    public init(_ defaults: Manifest.Sampling) {
        regular = Sampler(defaults)
        rescue = Sampler(
            topK: defaults.topK, topP: defaults.rescueTopP, temperature: defaults.rescueTemperature)
        recent = Array(repeating: -1, count: defaults.rescueWindow)
    }

    /// An index of `scores`; the last one is EOS. Both draws are always made.
    public mutating func choose(_ scores: [Float], uniforms: [[Float]]) -> Int {
        let first = regular.choose(scores, uniforms: uniforms[0])
        let second = rescue.choose(scores, uniforms: uniforms[1])
        let repeated = first != scores.count - 1 && recent.contains(first)
        let chosen = repeated ? second : first
        // The first token of all is never remembered: the reference makes its window after it.
        if frame > 0 && !recent.isEmpty { recent = recent.dropFirst() + [chosen] }
        frame += 1
        return chosen
    }
}
