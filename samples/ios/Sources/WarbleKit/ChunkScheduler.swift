import Foundation

/// Which frames go to the codec together: a short first chunk, so that sound comes early, then the
/// size that the exported function takes; what is left at the end is filled up with zeros.
public struct ChunkScheduler: Sendable {
    public struct Chunk: Equatable, Sendable {
        public let begin, frames, size: Int
    }

    public let first, stream: Int
    public private(set) var given = 0

    public init(first: Int = 1, stream: Int = 7) {
        self.first = first
        self.stream = stream
    }

    /// The next chunk that is complete with `known` frames, or, at the end, what is left.
    public mutating func next(known: Int, ended: Bool) -> Chunk? {
        let size = given == 0 ? first : stream
        let waiting = known - given
        guard waiting >= size || (ended && waiting > 0) else { return nil }
        let chunk = Chunk(begin: given, frames: min(waiting, size), size: size)
        given += chunk.frames
        return chunk
    }

    /// Prefill lengths that add up to `length`, the longest first.
    public static func prefill(_ length: Int, sizes: [Int]) -> [Int] {
        var left = length
        var found: [Int] = []
        for size in sizes.sorted(by: >) {
            while left >= size {
                found.append(size)
                left -= size
            }
        }
        return found
    }
}
