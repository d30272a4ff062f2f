import Foundation

/// Rows of `embeddings.safetensors`, looked up in the mapped file: what is not read costs no memory.
///
/// Row 0 of a column is a text or semantic id; at semantic ids the rows of all ten codes are added.
/// Sums are made in 32 bits.
public struct EmbeddingTables: Sendable {
    private struct Entry: Decodable {
        let dtype: String
        let shape: [Int]
        let dataOffsets: [Int]
    }

    private let data: Data
    private let text, books: (start: Int, rows: Int)
    private let tokens: Manifest.Tokens
    public let width: Int

    public init(file: URL, tokens: Manifest.Tokens) throws {
        data = try Data(contentsOf: file, options: .alwaysMapped)
        self.tokens = tokens
        guard data.count >= 8 else { throw WarbleError.damaged([file.lastPathComponent]) }
        let length = (0..<8).reduce(0) { $0 | Int(data[$1]) << (8 * $1) }
        guard length > 0, length <= data.count - 8,
            let header = try JSONSerialization.jsonObject(with: data[8..<8 + length])
                as? [String: Any]
        else { throw WarbleError.damaged([file.lastPathComponent]) }
        let size = data.count
        func table(_ name: String) throws -> (start: Int, rows: Int, width: Int) {
            guard let raw = header[name] else { throw WarbleError.missing(name) }
            let json = try JSONSerialization.data(withJSONObject: raw)
            let decoder = JSONDecoder()
            decoder.keyDecodingStrategy = .convertFromSnakeCase
            let entry = try decoder.decode(Entry.self, from: json)
            guard entry.dtype == "BF16", entry.shape.count == 2, entry.dataOffsets.count == 2,
                entry.shape[0] * entry.shape[1] * 2 == entry.dataOffsets[1] - entry.dataOffsets[0],
                8 + length + entry.dataOffsets[1] <= size
            else { throw WarbleError.damaged([file.lastPathComponent]) }
            return (8 + length + entry.dataOffsets[0], entry.shape[0], entry.shape[1])
        }
        let (first, second) = (
            try table("model.embeddings.weight"), try table("model.codebook_embeddings.weight")
        )
        (text, books) = ((first.start, first.rows), (second.start, second.rows))
        width = first.width
        guard second.width == width else { throw WarbleError.damaged([file.lastPathComponent]) }
    }

    /// The embedding of a column: an id, then ten codes.
    public func row(_ column: [Int32]) -> [Float] {
        var sum = [Float](repeating: 0, count: width)
        let id = Int(column[0])
        if id >= tokens.semanticBegin && id <= tokens.semanticEnd {
            for (book, code) in column.dropFirst().enumerated() {
                add(books.start, book * tokens.codebookSize + Int(code), to: &sum)
            }
        }
        add(text.start, id, to: &sum)
        return sum
    }

    private func add(_ start: Int, _ row: Int, to sum: inout [Float]) {
        data.withUnsafeBytes { bytes in
            for i in 0..<width {
                let at = start + (row * width + i) * 2
                let bits = UInt16(littleEndian: bytes.loadUnaligned(fromByteOffset: at, as: UInt16.self))
                sum[i] += Float(bitPattern: UInt32(bits) << 16)
            }
        }
    }
}
