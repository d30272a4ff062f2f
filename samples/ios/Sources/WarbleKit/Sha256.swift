import Foundation

/// SHA-256 where CryptoKit is not to be had (Linux). In an app, CryptoKit's is faster.
public enum Sha256 {
    public static func hex(of data: Data) -> String {
        var state: [UInt32] = [
            0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a,
            0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19,
        ]
        let whole = data.count / 64 * 64
        data.withUnsafeBytes { bytes in
            for at in stride(from: 0, to: whole, by: 64) {
                absorb(UnsafeRawBufferPointer(rebasing: bytes[at..<at + 64]), into: &state)
            }
        }
        var tail = [UInt8](data.suffix(data.count - whole))
        tail.append(0x80)
        while tail.count % 64 != 56 { tail.append(0) }
        let bits = UInt64(data.count) * 8
        for shift in stride(from: 56, through: 0, by: -8) {
            tail.append(UInt8(truncatingIfNeeded: bits >> UInt64(shift)))
        }
        tail.withUnsafeBytes { bytes in
            for at in stride(from: 0, to: bytes.count, by: 64) {
                absorb(UnsafeRawBufferPointer(rebasing: bytes[at..<at + 64]), into: &state)
            }
        }
        return state.map { String(format: "%08x", $0) }.joined()
    }

    private static func absorb(_ block: UnsafeRawBufferPointer, into state: inout [UInt32]) {
        var w = [UInt32](repeating: 0, count: 64)
        for i in 0..<16 {
            w[i] = (0..<4).reduce(UInt32(0)) { $0 << 8 | UInt32(block[4 * i + $1]) }
        }
        for i in 16..<64 {
            let a = w[i - 15], b = w[i - 2]
            let small0 = turn(a, 7) ^ turn(a, 18) ^ (a >> 3)
            let small1 = turn(b, 17) ^ turn(b, 19) ^ (b >> 10)
            w[i] = w[i - 16] &+ small0 &+ w[i - 7] &+ small1
        }
        var v = state
        for i in 0..<64 {
            let big1 = turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)
            let choice = (v[4] & v[5]) ^ (~v[4] & v[6])
            let first = v[7] &+ big1 &+ choice &+ constants[i] &+ w[i]
            let big0 = turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)
            let majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2])
            v = [first &+ big0 &+ majority, v[0], v[1], v[2], v[3] &+ first, v[4], v[5], v[6]]
        }
        for i in 0..<8 { state[i] = state[i] &+ v[i] }
    }

    private static func turn(_ x: UInt32, _ by: UInt32) -> UInt32 { x >> by | x << (32 - by) }

    /// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    private static let constants: [UInt32] = {
        var primes: [Int] = []
        var candidate = 2
        while primes.count < 64 {
            if primes.allSatisfy({ candidate % $0 != 0 }) { primes.append(candidate) }
            candidate += 1
        }
        // In whole numbers, since a Double has too few bits for all of them: the largest r with
        // r³ <= prime · 2⁹⁶ is the root times 2³². Its low half is what is wanted.
        return primes.map { prime in
            var root: UInt64 = 0
            for bit in stride(from: 35, through: 0, by: -1) {
                let next = root | 1 << UInt64(bit)
                let square = next.multipliedFullWidth(by: next)
                let low = square.low.multipliedFullWidth(by: next)
                let high = square.high &* next &+ low.high
                if high < UInt64(prime) << 32 { root = next }
            }
            return UInt32(truncatingIfNeeded: root)
        }
    }()
}
