import Foundation

/// Mono 16-bit PCM as a WAV file.
public enum WavFile {
    public static func data(_ samples: [Float], sampleRate: Int) -> Data {
        var data = Data("RIFF".utf8)
        func number<T: FixedWidthInteger>(_ value: T) {
            withUnsafeBytes(of: value.littleEndian) { data.append(contentsOf: $0) }
        }
        let bytes = UInt32(2 * samples.count)
        number(36 + bytes)
        data.append(Data("WAVEfmt ".utf8))
        number(UInt32(16))
        number(UInt16(1))  // PCM
        number(UInt16(1))  // channels
        number(UInt32(sampleRate))
        number(UInt32(2 * sampleRate))
        number(UInt16(2))  // bytes of a sample
        number(UInt16(16))  // bits
        data.append(Data("data".utf8))
        number(bytes)
        for sample in samples {
            number(Int16((min(max(sample, -1), 1) * 32767).rounded()))
        }
        return data
    }
}
