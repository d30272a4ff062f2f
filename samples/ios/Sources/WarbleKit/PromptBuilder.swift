import Foundation

/// Text and voice to token columns: a text or semantic id, then ten codes, zero at text.
public struct PromptBuilder: Sendable {
    private let tokens: Manifest.Tokens
    public static let multiple = 32

    public init(_ tokens: Manifest.Tokens) { self.tokens = tokens }

    /// White space folded, as the model was trained to read it.
    public static func folded(_ text: String) -> String {
        text.split(whereSeparator: \.isWhitespace).joined(separator: " ")
    }

    /// Ids of text, for a tokenizer that reads it byte by byte.
    public func ids(of text: String) throws -> [Int32] {
        guard tokens.byteIds.count == 256 else { throw WarbleError.noTokenizer }
        return text.utf8.map { tokens.byteIds[Int($0)] }
    }

    /// Rows of a whole prompt. `text` is already tokenised; `prefix` are the rows of a registered
    /// voice's file, or nil for one that is chosen by its token.
    public func rows(text: [Int32], voice: Manifest.Voice, prefix: [[Int32]]? = nil) -> [[Int32]] {
        var rows = prefix ?? []
        if prefix == nil {
            rows = Array(repeating: [], count: tokens.codebooks + 1)
            append(tokens.system + tokens.plain + tokens.end + tokens.user + voice.tokenIds, to: &rows)
        }
        append(text + tokens.end + tokens.assistant, to: &rows)
        return rows
    }

    /// Rows with padding on the left up to a multiple of 32, and how much of it there is.
    public func padded(_ rows: [[Int32]]) -> (rows: [[Int32]], padding: Int) {
        let length = rows[0].count
        let padding = (Self.multiple - length % Self.multiple) % Self.multiple
        let filled = rows.enumerated().map { index, row in
            Array(repeating: index == 0 ? Int32(tokens.pad) : 0, count: padding) + row
        }
        return (filled, padding)
    }

    private func append(_ ids: [Int32], to rows: inout [[Int32]]) {
        rows[0] += ids
        for row in 1..<rows.count { rows[row] += Array(repeating: 0, count: ids.count) }
    }
}
