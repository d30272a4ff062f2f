import Foundation

/// What an exported folder says about itself: the fields of manifest.json that an app uses.
public struct Manifest: Decodable, Sendable {
    public struct Audio: Decodable, Sendable {
        public let sampleRate: Int
        public let samplesPerFrame: Int
    }

    public struct Tokens: Decodable, Sendable {
        public let semanticBegin, semanticEnd, eos, pad, codebooks, codebookSize: Int
        public let system, plain, end, user, assistant: [Int32]
        /// The id of each byte if text is tokenised byte by byte (-1 where UTF-8 never goes).
        public let byteIds: [Int32]
    }

    public struct Sampling: Decodable, Sendable {
        public let topK: Int
        public let topP, temperature, minTemperature: Float
        public let rescueWindow: Int
        public let rescueTopP, rescueTemperature: Float
        public let maxFrames: Int
        public let maxTextCharacters: Int?
    }

    public struct Voice: Decodable, Sendable {
        public let name: String
        public let `default`: Bool
        public let tokenIds: [Int32]
        public let file: String
    }

    public struct File: Decodable, Sendable {
        public let path, sha256, role: String
        public let bytes: Int
        public let optional: Bool
    }

    public struct Tensor: Decodable, Sendable {
        public let name, dtype: String
        public let shape: [Int]
    }

    public struct State: Decodable, Sendable {
        public let name: String
        public let tensors: [Tensor]
    }

    public struct Function: Decodable, Sendable {
        public let name, file: String
        public let inputs, outputs: [Tensor]
        public let states: [State]
    }

    public struct Check: Decodable, Sendable {
        public let name, result, `where`: String
    }

    public struct Part: Decodable, Sendable {
        public let name: String
        public let files: [File]
        public let functions: [Function]
        public let checks: [Check]
    }

    public let schema: String
    public let audio: Audio
    public let tokens: Tokens
    public let sampling: Sampling
    public let voices: [Voice]
    public let files: [File]
    public let parts: [Part]

    public static let knownSchema = "warble-ios/1"

    public init(json: Data) throws {
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        self = try decoder.decode(Manifest.self, from: json)
        guard schema == Manifest.knownSchema else { throw WarbleError.schema(schema) }
    }

    public init(folder: URL) throws {
        try self.init(json: Data(contentsOf: folder.appendingPathComponent("manifest.json")))
    }

    public func part(_ name: String) throws -> Part {
        guard let found = parts.first(where: { $0.name == name }) else {
            throw WarbleError.missing("part \(name)")
        }
        return found
    }

    /// The voice of this name, any case; the default one if none is given.
    public func voice(_ name: String? = nil) throws -> Voice {
        let found = voices.first { voice in
            guard let name else { return voice.default }
            return voice.name.caseInsensitiveCompare(name) == .orderedSame
        }
        guard let found else { throw WarbleError.missing("voice \(name ?? "by default")") }
        return found
    }

    /// Paths whose file is missing, or of another size or hash. Optional files may be missing.
    public func damagedFiles(in folder: URL) -> [String] {
        (files + parts.flatMap(\.files)).filter { file in
            let url = folder.appendingPathComponent(file.path)
            guard let data = try? Data(contentsOf: url, options: .alwaysMapped) else {
                return !file.optional
            }
            return data.count != file.bytes || Sha256.hex(of: data) != file.sha256
        }.map(\.path)
    }
}

public enum WarbleError: Error, Equatable, CustomStringConvertible {
    case schema(String)
    case missing(String)
    case damaged([String])
    case noTokenizer
    case tooLong(wanted: Int, longest: Int)
    case background

    public var description: String {
        switch self {
        case .schema(let found):
            return "The folder has schema \(found); this code reads \(Manifest.knownSchema)."
        case .missing(let what): return "The folder has no \(what). Export it again."
        case .damaged(let paths): return "Damaged: \(paths.joined(separator: ", ")). Copy them again."
        case .noTokenizer:
            return "This model's tokenizer merges bytes: tokenise tokenizer.json with a library."
        case .tooLong(let wanted, let longest):
            return "Text and speech need \(wanted) positions, the longest cache has \(longest)."
        case .background: return "Given up while the app was in the background."
        }
    }
}
