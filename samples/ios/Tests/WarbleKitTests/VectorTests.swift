import XCTest

@testable import WarbleKit

/// The same inputs and results as in Python: vectors.json is written by the project's tests.
final class VectorTests: XCTestCase {
    struct Vectors: Decodable {
        struct Draw: Decodable {
            let scores, uniforms: [Float]
            let topK: Int
            let topP, temperature: Float
            let kept: [Int]
            let chosen: Int
        }
        struct Semantic: Decodable {
            let scores: [[Float]]
            let uniforms: [[[Float]]]
            let chosen: [Int]
        }
        struct Prompt: Decodable {
            let text: String
            let voice: String
            let ids: [Int32]
            let padding: Int
        }
        struct Schedule: Decodable {
            let frames: Int
            let chunks: [[Int]]
        }
        struct Wav: Decodable {
            let samples: [Float]
            let hex: String
        }
        struct Embedding: Decodable {
            let hex: String
            let tokens: Manifest.Tokens
            let columns: [[Int32]]
            let rows: [[Float]]
        }
        let draws: [Draw]
        let semantic: Semantic
        let prompts: [Prompt]
        let schedules: [Schedule]
        let prefill: [[Int]]
        let wav: Wav
        let embedding: Embedding
        let sha256: [String: String]
        let manifest: String
    }

    lazy var vectors: Vectors = {
        let url = Bundle.module.url(forResource: "vectors", withExtension: "json")!
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        return try! decoder.decode(Vectors.self, from: Data(contentsOf: url))
    }()
    lazy var manifest = try! Manifest(json: Data(vectors.manifest.utf8))

    func testDraws() {
        for draw in vectors.draws {
            let sampler = Sampler(topK: draw.topK, topP: draw.topP, temperature: draw.temperature)
            XCTAssertEqual(sampler.kept(draw.scores), draw.kept)
            XCTAssertEqual(sampler.choose(draw.scores, uniforms: draw.uniforms), draw.chosen)
        }
    }

    func testSemanticTokensAreRescued() {
        var sampler = SemanticSampler(manifest.sampling)
        let given = vectors.semantic
        for (step, wanted) in given.chosen.enumerated() {
            let chosen = sampler.choose(given.scores[step], uniforms: given.uniforms[step])
            XCTAssertEqual(chosen, wanted, "step \(step)")
        }
    }

    func testPrompts() throws {
        let builder = PromptBuilder(manifest.tokens)
        for prompt in vectors.prompts {
            let ids = try builder.ids(of: PromptBuilder.folded(prompt.text))
            let rows = builder.rows(text: ids, voice: try manifest.voice(prompt.voice))
            XCTAssertEqual(rows[0], prompt.ids)
            let padded = builder.padded(rows)
            XCTAssertEqual(padded.padding, prompt.padding)
            XCTAssertEqual(padded.rows[0].count % PromptBuilder.multiple, 0)
        }
    }

    func testChunks() {
        for schedule in vectors.schedules {
            var scheduler = ChunkScheduler()
            var found: [[Int]] = []
            for known in 1...schedule.frames {
                while let chunk = scheduler.next(known: known, ended: known == schedule.frames) {
                    found.append([chunk.begin, chunk.frames, chunk.size])
                }
            }
            XCTAssertEqual(found, schedule.chunks)
        }
        for sizes in vectors.prefill {
            let total = sizes.reduce(0, +)
            XCTAssertEqual(ChunkScheduler.prefill(total, sizes: [32, 128]), sizes)
        }
    }

    func testWav() {
        let data = WavFile.data(vectors.wav.samples, sampleRate: 44_100)
        XCTAssertEqual(data.map { String(format: "%02x", $0) }.joined(), vectors.wav.hex)
    }

    func testEmbeddingRows() throws {
        let given = vectors.embedding
        var bytes = Data()
        var rest = Substring(given.hex)
        while !rest.isEmpty {
            bytes.append(UInt8(rest.prefix(2), radix: 16)!)
            rest = rest.dropFirst(2)
        }
        let file = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        defer { try? FileManager.default.removeItem(at: file) }
        try bytes.write(to: file)
        let tables = try EmbeddingTables(file: file, tokens: given.tokens)
        for (column, row) in zip(given.columns, given.rows) {
            XCTAssertEqual(tables.row(column), row)
        }
        try bytes.dropLast(2).write(to: file)
        XCTAssertThrowsError(try EmbeddingTables(file: file, tokens: given.tokens))
    }

    func testSha256() {
        for (text, digest) in vectors.sha256 {
            XCTAssertEqual(Sha256.hex(of: Data(text.utf8)), digest)
        }
    }
}
